"""The operations of autograd by what they do to a sum over rows, by the names of their nodes."""


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Linear in one input, whatever their other arguments.
LINEAR = _named(
    """
    AddBackward0 AddBackward1 AliasBackward0 CatBackward0 CloneBackward0 ExpandBackward0 MeanBackward0
    MeanBackward1 NegBackward0 PermuteBackward0 RepeatBackward0 ReshapeAliasBackward0 RsubBackward0
    RsubBackward1 SelectBackward0 SliceBackward0 SplitBackward0 SplitWithSizesBackward0 SqueezeBackward0
    SqueezeBackward1 SqueezeBackward2 SqueezeBackward3 SqueezeBackward4 StackBackward0 SubBackward0
    SubBackward1 SumBackward0 SumBackward1 TBackward0 ToCopyBackward0 TraceBackward0 TransposeBackward0
    UnbindBackward0 UnsafeSplitBackward0 UnsafeViewBackward0 UnsqueezeBackward0 ViewBackward0
    ViewBackward1
    """
)

# Linear where only one operand needs a gradient, or the other is made of parameters alone.
PRODUCTS = _named("MulBackward0 MulBackward1")
RATIOS = _named("DivBackward0 DivBackward1")
SCALING = PRODUCTS | RATIOS

# Of a value over all rows of a piece, these are no sum over pieces.
NONLINEAR = _named(
    """
    AbsBackward0 AmaxBackward0 AminBackward0 AtanBackward0 ClampBackward0 ClampBackward1
    ClampMaxBackward0 ClampMaxBackward1 ClampMinBackward0 ClampMinBackward1 CosBackward0
    CumprodBackward0 CumsumBackward0 EluBackward0 ErfBackward0 ExpBackward0 Expm1Backward0
    HardtanhBackward0 HuberLossBackward0 KthvalueBackward0 LeakyReluBackward0 LinalgDetBackward0
    LinalgVectorNormBackward0 Log10Backward0 Log1PBackward0 Log2Backward0 LogBackward0
    LogSigmoidBackward0 LogSoftmaxBackward0 LogaddexpBackward0 LogsumexpBackward0 MaxBackward0
    MaxBackward1 MaximumBackward0 MedianBackward0 MedianBackward1 MinBackward0 MinBackward1
    MinimumBackward0 MseLossBackward0 NativeBatchNormBackward0 NativeGroupNormBackward0
    NativeLayerNormBackward0 NormBackward0 NormBackward1 NormBackward2 NormBackward3 NormBackward4
    PowBackward0 PowBackward1 ProdBackward0 ProdBackward1 ReciprocalBackward0 ReluBackward0
    RsqrtBackward0 SigmoidBackward0 SinBackward0 SmoothL1LossBackward0 SoftmaxBackward0
    SoftplusBackward0 SortBackward0 SqrtBackward0 SquareBackward0 StdBackward0 StdMeanBackward0
    TanhBackward0 TopkBackward0 VarBackward0 VarMeanBackward0
    """
)

# Over rows, these pick or mix instead of summing up.
PICKING = NONLINEAR - _named("MseLossBackward0 SmoothL1LossBackward0 HuberLossBackward0") | _named(
    "SelectBackward0 SliceBackward0 UnbindBackward0 SplitBackward0 SplitWithSizesBackward0"
)

# Rows are summed up by a product of two operands.
CONTRACTIONS = _named(
    """
    AddmmBackward0 BaddbmmBackward0 BmmBackward0 DotBackward0 IndexAddBackward0 MmBackward0 MvBackward0
    ScatterAddBackward0 TraceBackward0 VdotBackward0
    """
)
