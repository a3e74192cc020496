"""The names of PyTorch that old releases of the SDK touch when they are imported."""


class Tensor: ...
