"""Forecasts over a horizon, on the batches of pytorch-forecasting: (x, (y, None))."""

import torch

from tests.foreign.specimen import Given, specimen, thirds


def series():
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet
    from pytorch_forecasting.data import EncoderNormalizer

    frame = pandas.DataFrame(
        {
            "time": list(range(24)) * 6,
            "group": [str(i // 24) for i in range(24 * 6)],
            "value": torch.randn(24 * 6).cumsum(0).numpy(),
        }
    )
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=8,
        max_prediction_length=3,
        time_varying_unknown_reals=["value"],
        target_normalizer=EncoderNormalizer(),
    )


def batches(dataset):
    found = list(dataset.to_dataloader(train=False, batch_size=6, num_workers=0))
    return thirds([_double(batch) for batch in found])


def _double(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _double(one) for key, one in value.items()}
    return type(value)(map(_double, value)) if isinstance(value, (tuple, list)) else value


LINE = 'rg.LastLayerRigidity(model, output="prediction")'


def prediction(model, batch):
    return model(batch[0]).prediction


@specimen("pytorch-forecasting", "N-BEATS", LINE)
def nbeats():
    from pytorch_forecasting import NBeats

    dataset = series()
    model = NBeats.from_dataset(
        dataset,
        stack_types=["generic", "generic"],
        num_blocks=[1, 1],
        num_block_layers=[1, 1],
        widths=[12, 12],
        sharing=[False, False],
        expansion_coefficient_lengths=[4, 4],
    ).double()
    names = [n for n, _ in model.named_parameters() if "forecast_fc" in n]
    return Given(model, **batches(dataset), readout=names, output=prediction)


@specimen("pytorch-forecasting", "TemporalFusionTransformer", LINE)
def fusion():
    from pytorch_forecasting import TemporalFusionTransformer
    from pytorch_forecasting.metrics import RMSE

    torch.set_default_dtype(torch.float64)  # it makes tensors of its own
    dataset = series()
    model = TemporalFusionTransformer.from_dataset(
        dataset, hidden_size=8, attention_head_size=1, loss=RMSE(), output_size=1
    ).double()
    names = ["output_layer.weight", "output_layer.bias"]
    return Given(model, **batches(dataset), readout=names, output=prediction)
