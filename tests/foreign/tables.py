"""Networks for tables: numbers and categories."""

import torch

from tests.foreign.specimen import Given, specimen, thirds


def numbers(columns=4, rows=8, batches=16):
    return [
        (
            torch.randn(rows, columns, dtype=torch.float64),
            torch.randn(rows, 1, dtype=torch.float64),
        )
        for _ in range(batches)
    ]


def ft_transformer(categories):
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=4,
        cat_cardinalities=categories,
        d_out=1,
        n_blocks=1,
        d_block=16,
        attention_n_heads=2,
        attention_dropout=0.2,
        ffn_d_hidden=None,
        ffn_d_hidden_multiplier=2.0,
        ffn_dropout=0.1,
        residual_dropout=0.0,
    ).double()


HEAD = ["backbone.output.linear.weight", "backbone.output.linear.bias"]


@specimen(
    "rtdl_revisiting_models",
    "FT-Transformer, batches (x_cont, x_cat, y)",
    "rg.LastLayerRigidity(model)",
)
def ft_mixed():
    batches = [(x, torch.randint(0, 3, (len(x), 2)), y) for x, y in numbers()]
    return Given(
        ft_transformer([3, 3]),
        **thirds(batches),
        readout=HEAD,
        output=lambda m, b: m(b[0], b[1]),
    )


@specimen(
    "rtdl_revisiting_models",
    "FT-Transformer without categories, batches (x, y)",
    "rg.LastLayerRigidity(model, forward=lambda m, b: m(b[0], None))",
)
def ft_numbers():
    return Given(
        ft_transformer([]),
        **thirds(numbers()),
        readout=HEAD,
        output=lambda m, b: m(b[0], None),
    )


@specimen(
    "tabm",
    "TabM: the mean of its k heads",
    'rg.LastLayerRigidity(model, layer="output", forward=lambda m, b: m(b[0]).mean(1))',
)
def tabm():
    from tabm import TabM

    model = TabM.make(n_num_features=4, d_out=1, k=4, n_blocks=1, d_block=16).double()
    return Given(
        model,
        **thirds(numbers()),
        readout=["output.weight", "output.bias"],
        output=lambda m, b: m(b[0]).mean(1),
    )


@specimen(
    "pytorch_tabular",
    "CategoryEmbeddingModel",
    "rg.LastLayerRigidity(model, forward=lambda m, b: m(b))",
)
def category_embedding():
    import pandas
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    values = torch.randn(128, 4).numpy()
    frame = pandas.DataFrame(values, columns=["a", "b", "c", "y"])
    frame["kind"] = ["left", "right"] * 64
    data = DataConfig(
        target=["y"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"], num_workers=0
    )
    tabular = TabularModel(
        data_config=data,
        model_config=CategoryEmbeddingModelConfig(task="regression", layers="16-12"),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(batch_size=8, accelerator="cpu"),
        verbose=False,
    )
    datamodule = tabular.prepare_dataloader(train=frame, seed=0)
    model = tabular.prepare_model(datamodule)
    batches = [
        {key: value.double() if value.is_floating_point() else value for key, value in b.items()}
        for b in datamodule.train_dataloader()
    ]
    return Given(
        model.double(),
        **thirds(batches),
        readout=["head.layers.0.weight", "head.layers.0.bias"],
        output=lambda m, b: m(b)["logits"],
    )
