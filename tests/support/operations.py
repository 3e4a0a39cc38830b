"""The operations of torch that some code runs, counted where they are dispatched."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Names of the operations, views among them: `with Operations() as operations: ...`."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation).removeprefix("aten."))
        return operation(*args, **(kwargs or {}))
