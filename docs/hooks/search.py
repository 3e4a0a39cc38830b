"""Let the search find what readers ask for.

The theme writes an index of all pages, and this hook completes it:

- A page is found by the words that readers use and the page does not: `KEYWORDS` below.
- A name such as ``LastLayerRigidity`` is one word in the index, so that it is found in any case.
  Its parts, "Last Layer Rigidity", are added as words of their own.
- Guides come before the reference, and the reference before results and scripts.
"""

import json
import re
from pathlib import Path

KEYWORDS = {
    "start": "LastLayerRigidity fit fits pytorch torch install installation pip quickstart beginner regression",
    "tabular": "csv excel spreadsheet dataframe pandas polars parquet command line terminal",
    "models": "LSTM GRU RNN CNN transformer architecture supported compatible timm chemprop PyG",
    "limits": "trust overconfident failure classification limitations",
    "tutorials/first_error_bars": "tutorial notebook jupyter colab beginner walkthrough",
    "tutorials/trust_and_verdict": "tutorial notebook jupyter verdict",
    "tutorials/a_table": "tutorial notebook jupyter",
    "tutorials/peak_fit": "tutorial notebook jupyter spectrum",
    "concepts/epistemic_and_noise": "aleatoric epistemic uncertainty reducible irreducible",
    "concepts/when_bars_fail": "OOD out of distribution out-of-distribution outlier novelty shift "
    "extrapolation anomaly detection",
    "error_bars": "confidence interval credible interval standard deviation uncertainty criterion "
    "heteroscedastic heteroskedastic quantile prediction interval calibrate calibration predict",
    "theory": "credible bayesian posterior laplace approximation NTK neural tangent kernel hessian",
    "method": "gram matrix ridge features formula float64 precision",
    "how_to/batches": "DataLoader dataset batch dictionary collate loader",
    "how_to/targets": "multi-output multioutput multivariate missing NaN units normalise normalize "
    "standardize",
    "how_to/skewed": "skewed skew noise heteroscedastic heteroskedastic asymmetric log-normal",
    "how_to/derived": "error propagation ratio derived quantity",
    "how_to/forces": "forces force field gradient energy potential stress",
    "how_to/active_learning": "active learning acquisition labelling labeling bayesian optimization "
    "experimental design",
    "how_to/clusters": "ray dask cluster distributed spark",
    "streams": "streaming stream online incremental partial_fit drift out-of-core",
    "processes": "DDP distributed multi-GPU multigpu torchrun FSDP",
    "long_fits": "checkpoint resume interrupt progress",
    "files": "save load checkpoint safetensors pickle serialization serialise",
    "coverage": "conformal coverage guarantee confidence interval CQR",
    "propagation": "covariance correlation sum mean gradient jacobian error propagation",
    "deploy": "ONNX GPU CUDA deploy serving production export torchscript compile latency "
    "quantization half precision",
    "speed": "GPU CUDA benchmark memory fast slow runtime cost",
    "report": "report html calibration plot verdict",
    "scikit_learn": "scikit-learn sklearn GridSearchCV cross_val_score pipeline cross validation "
    "random forest",
    "trees": "XGBoost CatBoost LightGBM HistGradientBoosting gradient boosting random forest "
    "decision tree",
    "trainers": "lightning pytorch-lightning transformers Trainer huggingface hugging face callback",
    "any_regressor": "JAX scipy statsmodels curve_fit numpy flax keras parameters nonlinear least "
    "squares",
    "chemistry": "MACE ASE schnetpack PyG molecular dynamics molecules interatomic potential atoms "
    "nequip",
    "coming_from/laplace": "laplace laplace-torch bayesian",
    "coming_from/ensembles": "ensemble deep ensembles MC dropout monte carlo",
    "coming_from/mapie": "MAPIE conformal crepes",
    "coming_from/gaussian_processes": "gaussian process GP GPyTorch kriging",
    "evidence": "benchmark UCI comparison baseline results",
    "reference/last_layer": "LastLayerRigidity fit fits calibrate predict sample_weight",
    "reference/prediction": "interval quantile std",
}
"""What readers may ask for, by the page that answers: as weighty as words of its title."""

BOOSTS = {
    "reference/": 0.5,
    "examples/": 0.2,
    "experiments/": 0.2,
    "benchmarks/": 0.2,
    "CHANGELOG": 0.1,
    "what_changed": 0.1,
    "release": 0.1,
    "CONTRIBUTING": 0.1,
}
"""How much a page counts whose address begins so, unless the page itself says."""

NAME = re.compile(r"\b[A-Za-z]+[a-z][A-Z]\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def on_post_build(config, **_):
    """Complete the index, before the theme's plugin for offline use copies it."""
    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    for entry in index["docs"]:
        complete(entry)
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def complete(entry: dict[str, object]) -> None:
    """Add keywords, parts of names, and a boost to an entry: a page, or a section of one."""
    location = str(entry["location"])
    address, _, anchor = location.partition("#")
    page = address.removesuffix(".html")
    if page in KEYWORDS and not anchor:
        entry["keywords"] = KEYWORDS[page]
    parts = name_parts(f"{entry['title']} {entry['text']}")
    if parts:
        entry["parts"] = " ".join(parts)
    for beginning, boost in BOOSTS.items():
        if page.startswith(beginning):
            entry.setdefault("boost", boost)


def name_parts(text: str) -> list[str]:
    """The words that names in a text consist of, each once: ``GridSearchCV`` is Grid Search CV."""
    parts = dict.fromkeys(part for name in NAME.findall(text) for part in PART.findall(name))
    return [part for part in parts if len(part) > 1]
