"""Tensors on the binary wire, to and from the domain's."""

from tinsmith.protocol import tinker_pb2 as pb
from tinsmith.protocol.errors import ValidationFailed
from tinsmith.protocol.tensors import Csr, DType, Tensor

DTYPE_TO_WIRE = {DType.FLOAT32: pb.DTYPE_FLOAT32, DType.INT64: pb.DTYPE_INT64}
_DTYPE_OF_WIRE = {wire: dtype for dtype, wire in DTYPE_TO_WIRE.items()}


def write_tensor(message: pb.Tensor, tensor: Tensor) -> None:
    message.dtype = DTYPE_TO_WIRE[tensor.dtype]
    message.shape.extend(tensor.shape)
    if tensor.csr is None:
        message.dense = tensor.data
    else:
        message.sparse_csr.values = tensor.data
        message.sparse_csr.crow_indices = tensor.csr.crow
        message.sparse_csr.col_indices = tensor.csr.col


def read_tensor(message: pb.Tensor, field: str) -> Tensor:
    """Raises ValidationFailed naming `field`."""
    dtype = _DTYPE_OF_WIRE.get(message.dtype)
    if dtype is None:
        raise ValidationFailed(f"{field}: dtype {message.dtype} is not supported; send float32 or int64")
    if message.HasField("sparse_csr"):
        sparse = message.sparse_csr
        tensor = Tensor(dtype, tuple(message.shape), sparse.values, Csr(sparse.crow_indices, sparse.col_indices))
    else:
        # A tensor without a shape is a vector.
        shape = tuple(message.shape) or (len(message.dense) // dtype.itemsize,)
        tensor = Tensor(dtype, shape, message.dense)
    return tensor.check(field)
