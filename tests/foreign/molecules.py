"""Potentials and molecular property models, on the batches of their own loaders."""

import numpy as np
import torch

from tests.foreign.specimen import Given, specimen, thirds


def structures(count):
    """Small molecules of hydrogen, carbon and oxygen, with random energies."""
    from ase import Atoms

    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        size = int(rng.integers(3, 6))
        places = 1.1 * np.array([(i, (i * i) % 3, (i // 2) % 2) for i in range(size)])
        atoms = Atoms(rng.choice(["H", "C", "O"], size), places + 0.1 * rng.normal(size=(size, 3)))
        atoms.info["energy"] = float(rng.normal())
        found.append(atoms)
    return found


def mace_batches(count=64, batch_size=8):
    from mace import data
    from mace.tools import AtomicNumberTable, torch_geometric

    table = AtomicNumberTable([1, 6, 8])
    configs = []
    for atoms in structures(count):
        config = data.config_from_atoms(atoms)
        config.properties["energy"] = atoms.info["energy"]
        configs.append(data.AtomicData.from_config(config, z_table=table, cutoff=3.0))
    loader = torch_geometric.dataloader.DataLoader(configs, batch_size=batch_size)
    return thirds(loader)


def mace_model(numbers=(1, 6, 8)):
    from e3nn import o3
    from mace import modules

    torch.set_default_dtype(torch.float64)
    interaction = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    return modules.ScaleShiftMACE(
        r_max=3.0,
        num_bessel=4,
        num_polynomial_cutoff=5,
        max_ell=2,
        interaction_cls=interaction,
        interaction_cls_first=interaction,
        num_interactions=2,
        num_elements=len(numbers),
        hidden_irreps=o3.Irreps("8x0e + 8x1o"),
        MLP_irreps=o3.Irreps("6x0e"),
        atomic_energies=-np.arange(1.0, len(numbers) + 1),
        avg_num_neighbors=3.0,
        atomic_numbers=list(numbers),
        correlation=2,
        gate=torch.nn.functional.silu,
        atomic_inter_scale=0.7,
        atomic_inter_shift=0.1,
    )


def mace_energy(model, batch):
    return model(batch.to_dict(), compute_force=False)["energy"]


def mace_slope(model, batch):
    inputs = batch.to_dict()
    energy = model(inputs, compute_force=False, training=True)["energy"]
    return torch.autograd.grad(energy.sum(), inputs["positions"], create_graph=True)[0]


@specimen(
    "mace-torch",
    "ScaleShiftMACE, energies and forces",
    'rg.LastLayerRigidity(model, layer="readouts", forward=lambda m, b: m(b.to_dict()),'
    ' output="energy", target=lambda b: b.energy)',
    wrt="positions",
)
def mace():
    return Given(
        mace_model(),
        **mace_batches(),
        readout=["readouts.0.linear.weight", "readouts.1.linear_2.weight"],
        output=mace_energy,
        slope=mace_slope,
    )


@specimen(
    "schnetpack",
    "PaiNN with forces in its forward pass",
    "rg.LastLayerRigidity(model, forward=lambda m, b: m(dict(b)),"
    ' output="energy", target=lambda b: b["energy"])',
    wrt="_positions",
)
def painn():
    import schnetpack as spk
    from schnetpack.interfaces import AtomsConverter
    from schnetpack.transform import ASENeighborList

    model = spk.model.NeuralNetworkPotential(
        representation=spk.representation.PaiNN(
            n_atom_basis=16,
            n_interactions=1,
            radial_basis=spk.nn.GaussianRBF(n_rbf=8, cutoff=3.0),
            cutoff_fn=spk.nn.CosineCutoff(3.0),
        ),
        input_modules=[spk.atomistic.PairwiseDistances()],
        output_modules=[
            spk.atomistic.Atomwise(n_in=16, output_key="energy"),
            spk.atomistic.Forces(),
        ],
        input_dtype_str="float64",
    ).double()
    converter = AtomsConverter(ASENeighborList(cutoff=3.0), dtype=torch.float64)
    frames, batches = structures(64), []
    for i in range(0, 64, 8):
        energies = [atoms.info["energy"] for atoms in frames[i : i + 8]]
        batch = converter(frames[i : i + 8])
        batches.append({**batch, "energy": torch.tensor(energies, dtype=torch.float64)})

    def energy(model, batch):
        return model(dict(batch))["energy"]

    def slope(model, batch):
        return -model(dict(batch))["forces"]

    head = "output_modules.0.outnet.1"
    return Given(
        model,
        **thirds(batches),
        readout=[f"{head}.weight", f"{head}.bias"],
        output=energy,
        slope=slope,
        moved=True,
    )


@specimen(
    "chemprop",
    "MPNN",
    "rg.LastLayerRigidity(model, forward=lambda m, b: m(b.bmg, b.V_d, b.X_d),"
    " target=lambda b: b.Y)",
)
def mpnn():
    from chemprop import data, models, nn

    model = models.MPNN(
        nn.BondMessagePassing(d_h=16, depth=2),
        nn.MeanAggregation(),
        nn.RegressionFFN(input_dim=16, hidden_dim=12),
        batch_norm=False,
    ).double()
    rng = np.random.default_rng(0)
    smiles = ["C" * i + tail for i in range(1, 9) for tail in ("", "O", "N", "C(=O)O", "C#N", "Cl")]
    points = [data.MoleculeDatapoint.from_smi(smi, rng.normal(size=1)) for smi in smiles]
    order = rng.permutation(len(points))
    loader = data.build_dataloader(
        data.MoleculeDataset([points[i] for i in order]), batch_size=6, shuffle=False
    )
    batches = list(loader)
    for batch in batches:  # chemprop makes float32
        batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
    head = "predictor.ffn.1.2"
    return Given(
        model,
        **thirds(batches),
        readout=[f"{head}.weight", f"{head}.bias"],
        output=lambda m, b: m(b.bmg, b.V_d, b.X_d),
    )


@specimen(
    "e3nn",
    "SimpleNetwork: the last convolution and its self-connection",
    'rg.LastLayerRigidity(model, layer=["mp.layers.1.sc", "mp.layers.1.lin2"],'
    ' forward=lambda m, b: m({"pos": b["pos"], "x": b["x"], "batch": b["batch"]}),'
    ' target=lambda b: b["energy"])',
)
def simple_network():
    from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork

    torch.set_default_dtype(torch.float64)
    model = SimpleNetwork(
        irreps_in="3x0e",
        irreps_out="0e",
        max_radius=2.0,
        num_neighbors=3.0,
        num_nodes=5.0,
        layers=1,
        mul=4,
        lmax=1,
    )
    batches = [
        {
            "pos": torch.randn(20, 3),
            "x": torch.randn(20, 3),
            "batch": torch.arange(20) // 5,
            "energy": torch.randn(4, 1),
        }
        for _ in range(16)
    ]

    def energy(model, batch):
        return model({name: batch[name] for name in ("pos", "x", "batch")})

    return Given(
        model,
        **thirds(batches),
        readout=["mp.layers.1.sc.weight", "mp.layers.1.lin2.weight"],
        output=energy,
    )
