"""Names and numbers of TensorFlow Lite's schema (tensorflow/compiler/mlir/lite/schema/schema.fbs, version 3).

The package tflite has them too, as 187 modules; these take 40 ms to import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from dovetail.read.values import words

TENSOR_TYPES = words("""
    FLOAT32 FLOAT16 INT32 UINT8 INT64 STRING BOOL INT16 COMPLEX64 INT8 FLOAT64 COMPLEX128 UINT64 RESOURCE VARIANT
    UINT32 UINT16 INT4 BFLOAT16
""")
"""Names of TensorType, by number."""

BUILTIN_OPERATORS = words("""
    ADD AVERAGE_POOL_2D CONCATENATION CONV_2D DEPTHWISE_CONV_2D DEPTH_TO_SPACE DEQUANTIZE EMBEDDING_LOOKUP FLOOR
    FULLY_CONNECTED HASHTABLE_LOOKUP L2_NORMALIZATION L2_POOL_2D LOCAL_RESPONSE_NORMALIZATION LOGISTIC
    LSH_PROJECTION LSTM MAX_POOL_2D MUL RELU RELU_N1_TO_1 RELU6 RESHAPE RESIZE_BILINEAR RNN SOFTMAX SPACE_TO_DEPTH
    SVDF TANH CONCAT_EMBEDDINGS SKIP_GRAM CALL CUSTOM EMBEDDING_LOOKUP_SPARSE PAD UNIDIRECTIONAL_SEQUENCE_RNN GATHER
    BATCH_TO_SPACE_ND SPACE_TO_BATCH_ND TRANSPOSE MEAN SUB DIV SQUEEZE UNIDIRECTIONAL_SEQUENCE_LSTM STRIDED_SLICE
    BIDIRECTIONAL_SEQUENCE_RNN EXP TOPK_V2 SPLIT LOG_SOFTMAX DELEGATE BIDIRECTIONAL_SEQUENCE_LSTM CAST PRELU MAXIMUM
    ARG_MAX MINIMUM LESS NEG PADV2 GREATER GREATER_EQUAL LESS_EQUAL SELECT SLICE SIN TRANSPOSE_CONV SPARSE_TO_DENSE
    TILE EXPAND_DIMS EQUAL NOT_EQUAL LOG SUM SQRT RSQRT SHAPE POW ARG_MIN FAKE_QUANT REDUCE_PROD REDUCE_MAX PACK
    LOGICAL_OR ONE_HOT LOGICAL_AND LOGICAL_NOT UNPACK REDUCE_MIN FLOOR_DIV REDUCE_ANY SQUARE ZEROS_LIKE FILL
    FLOOR_MOD RANGE RESIZE_NEAREST_NEIGHBOR LEAKY_RELU SQUARED_DIFFERENCE MIRROR_PAD ABS SPLIT_V UNIQUE CEIL
    REVERSE_V2 ADD_N GATHER_ND COS WHERE RANK ELU REVERSE_SEQUENCE MATRIX_DIAG QUANTIZE MATRIX_SET_DIAG ROUND
    HARD_SWISH IF WHILE NON_MAX_SUPPRESSION_V4 NON_MAX_SUPPRESSION_V5 SCATTER_ND SELECT_V2 DENSIFY SEGMENT_SUM
    BATCH_MATMUL PLACEHOLDER_FOR_GREATER_OP_CODES CUMSUM CALL_ONCE BROADCAST_TO RFFT2D CONV_3D IMAG REAL COMPLEX_ABS
    HASHTABLE HASHTABLE_FIND HASHTABLE_IMPORT HASHTABLE_SIZE REDUCE_ALL CONV_3D_TRANSPOSE VAR_HANDLE READ_VARIABLE
    ASSIGN_VARIABLE BROADCAST_ARGS RANDOM_STANDARD_NORMAL BUCKETIZE RANDOM_UNIFORM MULTINOMIAL GELU
    DYNAMIC_UPDATE_SLICE RELU_0_TO_1 UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_SUM ATAN2
    UNSORTED_SEGMENT_MIN SIGN BITCAST BITWISE_XOR RIGHT_SHIFT STABLEHLO_LOGISTIC STABLEHLO_ADD STABLEHLO_DIVIDE
    STABLEHLO_MULTIPLY STABLEHLO_MAXIMUM STABLEHLO_RESHAPE STABLEHLO_CLAMP STABLEHLO_CONCATENATE
    STABLEHLO_BROADCAST_IN_DIM STABLEHLO_CONVOLUTION STABLEHLO_SLICE STABLEHLO_CUSTOM_CALL STABLEHLO_REDUCE
    STABLEHLO_ABS STABLEHLO_AND STABLEHLO_COSINE STABLEHLO_EXPONENTIAL STABLEHLO_FLOOR STABLEHLO_LOG
    STABLEHLO_MINIMUM STABLEHLO_NEGATE STABLEHLO_OR STABLEHLO_POWER STABLEHLO_REMAINDER STABLEHLO_RSQRT
    STABLEHLO_SELECT STABLEHLO_SUBTRACT STABLEHLO_TANH STABLEHLO_SCATTER STABLEHLO_COMPARE STABLEHLO_CONVERT
    STABLEHLO_DYNAMIC_SLICE STABLEHLO_DYNAMIC_UPDATE_SLICE STABLEHLO_PAD STABLEHLO_IOTA STABLEHLO_DOT_GENERAL
    STABLEHLO_REDUCE_WINDOW STABLEHLO_SORT STABLEHLO_WHILE STABLEHLO_GATHER STABLEHLO_TRANSPOSE DILATE
    STABLEHLO_RNG_BIT_GENERATOR REDUCE_WINDOW STABLEHLO_COMPOSITE STABLEHLO_SHIFT_LEFT STABLEHLO_CBRT
""")
"""Names of BuiltinOperator, by number."""

_OPTIONS = """
    NONE Conv2DOptions(Padding:b StrideW:i StrideH:i FusedActivationFunction:b DilationWFactor:i=1
    DilationHFactor:i=1 QuantizedBiasType:b) DepthwiseConv2DOptions(Padding:b StrideW:i StrideH:i DepthMultiplier:i
    FusedActivationFunction:b DilationWFactor:i=1 DilationHFactor:i=1) ConcatEmbeddingsOptions(NumChannels:i
    NumColumnsPerChannel:[i EmbeddingDimPerChannel:[i) LSHProjectionOptions(Type:b) Pool2DOptions(Padding:b
    StrideW:i StrideH:i FilterWidth:i FilterHeight:i FusedActivationFunction:b) SVDFOptions(Rank:i
    FusedActivationFunction:b AsymmetricQuantizeInputs:?) RNNOptions(FusedActivationFunction:b
    AsymmetricQuantizeInputs:?) FullyConnectedOptions(FusedActivationFunction:b WeightsFormat:b KeepNumDims:?
    AsymmetricQuantizeInputs:? QuantizedBiasType:b) SoftmaxOptions(Beta:f) ConcatenationOptions(Axis:i
    FusedActivationFunction:b) AddOptions(FusedActivationFunction:b PotScaleInt16:?=1)
    L2NormOptions(FusedActivationFunction:b) LocalResponseNormalizationOptions(Radius:i Bias:f Alpha:f Beta:f)
    LSTMOptions(FusedActivationFunction:b CellClip:f ProjClip:f KernelType:b AsymmetricQuantizeInputs:?)
    ResizeBilinearOptions(- - AlignCorners:? HalfPixelCenters:?) CallOptions(Subgraph:I) ReshapeOptions(NewShape:[i)
    SkipGramOptions(NgramSize:i MaxSkipSize:i IncludeAllNgrams:?) SpaceToDepthOptions(BlockSize:i)
    EmbeddingLookupSparseOptions(Combiner:b) MulOptions(FusedActivationFunction:b) PadOptions GatherOptions(Axis:i
    BatchDims:i) BatchToSpaceNDOptions SpaceToBatchNDOptions TransposeOptions ReducerOptions(KeepDims:?)
    SubOptions(FusedActivationFunction:b PotScaleInt16:?=1) DivOptions(FusedActivationFunction:b)
    SqueezeOptions(SqueezeDims:[i) SequenceRNNOptions(TimeMajor:? FusedActivationFunction:b
    AsymmetricQuantizeInputs:?) StridedSliceOptions(BeginMask:i EndMask:i EllipsisMask:i NewAxisMask:i
    ShrinkAxisMask:i Offset:?) ExpOptions TopKV2Options SplitOptions(NumSplits:i) LogSoftmaxOptions
    CastOptions(InDataType:b OutDataType:b) DequantizeOptions MaximumMinimumOptions ArgMaxOptions(OutputType:b)
    LessOptions NegOptions PadV2Options GreaterOptions GreaterEqualOptions LessEqualOptions SelectOptions
    SliceOptions TransposeConvOptions(Padding:b StrideW:i StrideH:i FusedActivationFunction:b QuantizedBiasType:b)
    SparseToDenseOptions(ValidateIndices:?) TileOptions ExpandDimsOptions EqualOptions NotEqualOptions
    ShapeOptions(OutType:b) PowOptions ArgMinOptions(OutputType:b) FakeQuantOptions(Min:f Max:f NumBits:i
    NarrowRange:?) PackOptions(ValuesCount:i Axis:i) LogicalOrOptions OneHotOptions(Axis:i) LogicalAndOptions
    LogicalNotOptions UnpackOptions(Num:i Axis:i) FloorDivOptions SquareOptions ZerosLikeOptions FillOptions
    BidirectionalSequenceLSTMOptions(FusedActivationFunction:b CellClip:f ProjClip:f MergeOutputs:? TimeMajor:?=1
    AsymmetricQuantizeInputs:?) BidirectionalSequenceRNNOptions(TimeMajor:? FusedActivationFunction:b MergeOutputs:?
    AsymmetricQuantizeInputs:?) UnidirectionalSequenceLSTMOptions(FusedActivationFunction:b CellClip:f ProjClip:f
    TimeMajor:? AsymmetricQuantizeInputs:? DiagonalRecurrentTensors:?) FloorModOptions RangeOptions
    ResizeNearestNeighborOptions(AlignCorners:? HalfPixelCenters:?) LeakyReluOptions(Alpha:f)
    SquaredDifferenceOptions MirrorPadOptions(Mode:b) AbsOptions SplitVOptions(NumSplits:i)
    UniqueOptions(IdxOutType:b=2) ReverseV2Options AddNOptions GatherNdOptions CosOptions WhereOptions RankOptions
    ReverseSequenceOptions(SeqDim:i BatchDim:i) MatrixDiagOptions QuantizeOptions MatrixSetDiagOptions
    HardSwishOptions IfOptions(ThenSubgraphIndex:i ElseSubgraphIndex:i) WhileOptions(CondSubgraphIndex:i
    BodySubgraphIndex:i) DepthToSpaceOptions(BlockSize:i) NonMaxSuppressionV4Options NonMaxSuppressionV5Options
    ScatterNdOptions SelectV2Options DensifyOptions SegmentSumOptions BatchMatMulOptions(AdjX:? AdjY:?
    AsymmetricQuantizeInputs:?) CumsumOptions(Exclusive:? Reverse:?) CallOnceOptions(InitSubgraphIndex:i)
    BroadcastToOptions Rfft2dOptions Conv3DOptions(Padding:b StrideD:i StrideW:i StrideH:i FusedActivationFunction:b
    DilationDFactor:i=1 DilationWFactor:i=1 DilationHFactor:i=1) HashtableOptions(TableId:i KeyDtype:b ValueDtype:b)
    HashtableFindOptions HashtableImportOptions HashtableSizeOptions VarHandleOptions(Container:s SharedName:s)
    ReadVariableOptions AssignVariableOptions RandomOptions(Seed:q Seed2:q) BucketizeOptions(Boundaries:[f)
    GeluOptions(Approximate:?) DynamicUpdateSliceOptions UnsortedSegmentProdOptions UnsortedSegmentMaxOptions
    UnsortedSegmentMinOptions UnsortedSegmentSumOptions ATan2Options SignOptions BitcastOptions BitwiseXorOptions
    RightShiftOptions
"""
"""The tables of the union BuiltinOptions, by number, with the fields of each in order. A field has a letter of `struct`
(s is a text, [ a vector) and its default where that is not 0; - is a field that is no longer used."""


class OptionTable(NamedTuple):
    """A table of options."""

    name: str
    number: int
    """Number in the union."""
    fields: Mapping[int, tuple[str, str, float | bool]]
    """Place in the table -> name, kind and default."""


@cache
def option_tables() -> Mapping[str, OptionTable]:
    """The tables of options by their name in small letters, without the word itself."""
    found = {}
    for number, (name, fields) in enumerate(re.findall(r"(\w+)(?:\(([^)]*)\))?", _OPTIONS)):
        parts = {place: re.split("[:=]", text) for place, text in enumerate(fields.split()) if text != "-"}
        known = {place: (one[0], one[1], _default(*one[1:])) for place, one in parts.items()}
        found[name.removesuffix("Options").lower()] = OptionTable(name, number, known)
    return found


def _default(kind: str, value: str = "0") -> float | bool:
    return value == "1" if kind == "?" else float(value) if kind == "f" else int(value)
