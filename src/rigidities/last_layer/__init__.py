"""Error bars from a model's readout: the façade `LastLayerRigidity` and its parts."""

from .rigidity import LastLayerRigidity

__all__ = ["LastLayerRigidity"]
