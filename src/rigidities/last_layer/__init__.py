"""Error bars from a model's readout: the façade `LastLayerRigidity` and what stands behind it."""

from .rigidity import LastLayerRigidity

__all__ = ["LastLayerRigidity"]
