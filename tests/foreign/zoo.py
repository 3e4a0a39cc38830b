"""All specimens, in the order of the table."""

from importlib import import_module

from tests.foreign.specimen import SPECIMENS

HOUSES = "language images graphs molecules tables fields forecasting training keras_models"

for house in HOUSES.split():
    import_module(f"tests.foreign.{house}")

__all__ = ["SPECIMENS"]
