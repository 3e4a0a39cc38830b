"""What is known of the sets that can be downloaded: columns in our order, sizes, means."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """One set: where it can be fetched, and by what it is recognised.

    Attributes:
        file: The name under which it is kept.
        archive: "OpenML", "UCI" or "scikit-learn".
        number: The number of the set in that archive.
        rows: The number of rows of the published set.
        columns: Means over all rows by the names of the inputs, in our order.
        target: The name of the target.
        mean: The mean of the target.
        spellings: Names of the target elsewhere.
        others: Columns that are neither input nor our target.
        constants: Values of columns that never change, which some copies leave out.
        first: Target and first inputs of the first row, where the order of the rows matters.
    """

    file: str
    archive: str
    number: int
    rows: int
    columns: dict[str, float]
    target: str
    mean: float
    spellings: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    constants: dict[str, float] = field(default_factory=dict)
    first: tuple[float, ...] = ()

    @property
    def where(self) -> str:
        """The archive and the number, in words."""
        return f"{self.archive} {self.number}" if self.number else self.archive


CONCRETE = Source(
    file="uci_concrete.npz",
    archive="OpenML",
    number=44959,
    rows=1030,
    columns={
        "Cement": 281.168,
        "BlastFurnaceSlag": 73.8958,
        "FlyAsh": 54.1883,
        "Water": 181.567,
        "Superplasticizer": 6.20466,
        "CoarseAggregate": 972.919,
        "FineAggregate": 773.58,
        "Age": 45.6621,
    },
    target="CompressiveStrength",
    mean=35.817961,
    spellings=("strength", "ConcreteCompressiveStrength"),
)
ENERGY = Source(
    file="uci_energy.npz",
    archive="OpenML",
    number=44960,
    rows=768,
    columns={
        "RelativeCompactness": 0.764167,
        "SurfaceArea": 671.708,
        "WallArea": 318.5,
        "RoofArea": 176.604,
        "OverallHeight": 5.25,
        "Orientation": 3.5,
        "GlazingArea": 0.234375,
        "GlazingAreaDistribution": 2.8125,
    },
    target="HeatingLoad",
    mean=22.307201,
    others=("CoolingLoad",),
)
KIN8NM = Source(
    file="uci_kin8nm.npz",
    archive="OpenML",
    number=44980,
    rows=8192,
    columns={
        "theta1": 0.009351,
        "theta2": -0.00723271,
        "theta3": 0.022792,
        "theta4": -0.0129449,
        "theta5": 0.0078856,
        "theta6": -0.00969764,
        "theta7": 0.00840227,
        "theta8": 0.00122667,
    },
    target="y",
    mean=0.71428349,
)
NAVAL = Source(
    file="uci_naval.npz",
    archive="OpenML",
    number=44969,
    rows=11934,
    columns={
        "lp": 5.16667,
        "v": 15.0,
        "GTT": 27247.5,
        "GTn": 2136.29,
        "GGn": 8200.95,
        "Ts": 227.336,
        "Tp": 227.336,
        "T48": 735.495,
        "T1": 288.0,
        "T2": 646.215,
        "P48": 2.35296,
        "P1": 0.998,
        "P2": 12.2971,
        "Pexh": 1.02947,
        "TIC": 33.6413,
        "mf": 0.66244,
    },
    target="kMc",
    mean=0.975,
    spellings=("gt_compressor_decay_state_coefficient",),
    others=("kMt", "gt_turbine_decay_state_coefficient"),
    constants={"T1": 288.0, "P1": 0.998},
)
POWER = Source(
    file="uci_power.npz",
    archive="UCI",
    number=294,
    rows=9568,
    columns={"AT": 19.6512, "V": 54.3058, "AP": 1013.26, "RH": 73.309},
    target="PE",
    mean=454.36501,
)
PROTEIN = Source(
    file="uci_protein.npz",
    archive="OpenML",
    number=44963,
    rows=45730,
    columns={
        "F1": 9871.6,
        "F2": 3017.37,
        "F3": 0.302392,
        "F4": 103.492,
        "F5": 1368300.0,
        "F6": 145.638,
        "F7": 3989.76,
        "F8": 69.9751,
        "F9": 34.5237,
    },
    target="RMSD",
    mean=7.7485284,
)
WINE = Source(
    file="uci_wine.npz",
    archive="OpenML",
    number=44972,
    rows=1599,
    columns={
        "fixed_acidity": 8.31964,
        "volatile_acidity": 0.527821,
        "citric_acid": 0.270976,
        "residual_sugar": 2.53881,
        "chlorides": 0.0874665,
        "free_sulfur_dioxide": 15.8749,
        "total_sulfur_dioxide": 46.4678,
        "density": 0.996747,
        "pH": 3.31111,
        "sulphates": 0.658149,
        "alcohol": 10.423,
    },
    target="quality",
    mean=5.6360225,
)
YACHT = Source(
    file="uci_yacht.npz",
    archive="UCI",
    number=243,
    rows=308,
    columns={
        "LongitudinalPosition": -2.38182,
        "PrismaticCoefficient": 0.564136,
        "LengthDisplacementRatio": 4.78864,
        "BeamDraughtRatio": 3.93682,
        "LengthBeamRatio": 3.20682,
        "FroudeNumber": 0.2875,
    },
    target="ResiduaryResistance",
    mean=10.495357,
)
YEAR = Source(
    file="uci_year.npz",
    archive="UCI",
    number=203,
    rows=515345,
    columns=dict.fromkeys(
        [f"timbre_avg_{i:02}" for i in range(1, 13)] + [f"timbre_cov_{i:02}" for i in range(1, 79)],
        float("nan"),
    ),
    target="year",
    mean=float("nan"),
    first=(2001, 49.94357, 21.47114, 73.0775),
)
"""The means of this one are not known here; its first row is."""

CALIFORNIA = Source(
    file="california_housing.npz",
    archive="scikit-learn's fetch_california_housing",
    number=0,
    rows=20640,
    columns={
        "MedInc": 3.87067,
        "HouseAge": 28.6395,
        "AveRooms": 5.429,
        "AveBedrms": 1.09668,
        "Population": 1425.48,
        "AveOccup": 3.07066,
        "Latitude": 35.6319,
        "Longitude": -119.57,
    },
    target="MedHouseVal",
    mean=2.0685582,
)
