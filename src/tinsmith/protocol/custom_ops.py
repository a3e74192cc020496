"""The allow-list of custom losses as data: what a caller's graph may name. `engines/custom_ops.py` implements exactly this set.

All are pure functions of tensors whose result's shape follows from the shapes of their arguments, never from values: sizes can then be
bounded before anything is computed. So there is nothing here that draws random numbers, writes in place, reads uninitialised memory, turns
a tensor into a Python value, or selects by a boolean mask.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _words(
    """
    abs add addcdiv addcmul asinh atan atan2 ceil clamp clamp_max clamp_min clip cos cosh div divide eq erf exp exp2 expm1 floor
    floor_divide fmax fmin frac ge greater greater_equal gt hypot isfinite isinf isnan le lerp less less_equal log log10 log1p
    log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mul multiply nan_to_num ne
    neg negative not_equal pow reciprocal relu remainder round rsqrt sigmoid sign sin sinh sqrt square sub subtract tan tanh
    true_divide trunc xlogy
    """
)
_REDUCTIONS = _words("all amax amin any argmax argmin count_nonzero logsumexp max mean min nansum std sum var")
_SCANS = _words("cumsum logcumsumexp log_softmax softmax")
_INDEXING = _words("diagonal gather index_select masked_fill narrow select take_along_dim tril triu where")
_SHAPES = _words(
    """
    broadcast_to clone detach flatten flip movedim moveaxis permute reshape roll squeeze swapaxes t tile transpose unsqueeze
    """
)
_BOTH = _ELEMENTWISE | _REDUCTIONS | _SCANS | _INDEXING | _SHAPES

_TORCH = _words("arange cat concat dot full_like numel ones ones_like stack zeros zeros_like")
_NEURAL = frozenset(
    {
        *(
            f"torch.nn.functional.{name}"
            for name in _words("elu leaky_relu log_softmax logsigmoid relu sigmoid silu softmax softplus tanh")
        ),
        # What tracers write for the two that are built in.
        "torch._C._nn.log_sigmoid",
        "torch._C._nn.softplus",
    }
)
_ARITHMETIC = _words("abs add and_ eq floordiv ge getitem gt invert le lt mod mul ne neg or_ pos pow sub truediv xor")
_MATH = _words("ceil cos exp expm1 fabs floor log log10 log1p log2 sin sqrt tanh")

FUNCTIONS = frozenset(
    {
        "getattr",
        *(f"torch.{name}" for name in _BOTH | _TORCH),
        *(f"operator.{name}" for name in _ARITHMETIC),
        *(f"math.{name}" for name in _MATH),
        *_NEURAL,
    }
)
METHODS = _BOTH | _words(
    """
    bool contiguous dim dot double expand expand_as float int long new_full new_ones new_zeros numel repeat reshape_as size to
    type_as view view_as
    """
)
ATTRIBUTES = frozenset({"T", "device", "dtype", "indices", "mT", "ndim", "shape", "values"})
KEYWORDS = _words(
    """
    _stacklevel alpha axis beta correction decimals device diagonal dim dim0 dim1 dims dtype end end_dim eps exponent fill_value
    index indices inplace input keepdim length max min nan negative_slope neginf offset other posinf rounding_mode shifts size
    source start start_dim step tensors threshold unbiased value weight
    """
)
ROUNDING_MODES = frozenset({"floor", "trunc"})
DTYPES = frozenset({"bfloat16", "bool", "float16", "float32", "float64", "int32", "int64"})
