"""The table of Keras layers: class -> importer. Adding a layer is one entry."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.frontend import keras_attention as attention
from dovetail.frontend import keras_linear as linear
from dovetail.frontend import keras_merging as merging
from dovetail.frontend import keras_movement as movement
from dovetail.frontend import keras_normalisation as normalisation
from dovetail.frontend.keras_activation import ACTIVATION_LAYERS, importer
from dovetail.frontend.keras_context import Importer
from dovetail.frontend.keras_operations import tensorflow_operation
from dovetail.frontend.keras_pooling import pool, whole_pool
from dovetail.frontend.keras_recurrent import RECURRENT
from dovetail.operators.elementwise import BinaryKind
from dovetail.operators.pooling import AveragePool2d, MaxPool2d

IDENTITIES = (
    *("ActivityRegularization", "AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise", "Identity"),
    *("SpatialDropout1D", "SpatialDropout2D"),
    *("RandomBrightness", "RandomContrast", "RandomFlip", "RandomRotation", "RandomTranslation", "RandomZoom"),
)
"""Layers that do nothing at inference."""

LAYERS: Mapping[str, Importer] = {
    **{name: importer(function) for name, function in ACTIVATION_LAYERS.items()},
    **dict.fromkeys(IDENTITIES, movement.identity),
    **RECURRENT,
    "Add": merging.merge(BinaryKind.ADD),
    "Attention": attention.attention,
    "Average": merging.merge(BinaryKind.ADD, mean=True),
    "AveragePooling1D": pool(AveragePool2d, 1),
    "AveragePooling2D": pool(AveragePool2d, 2),
    "BatchNormalization": normalisation.batch_normalization,
    "CenterCrop": movement.center_crop,
    "Concatenate": merging.concatenate,
    "Conv1D": linear.convolution,
    "Conv1DTranspose": linear.transposed,
    "Conv2D": linear.convolution,
    "Conv2DTranspose": linear.transposed,
    "Cropping1D": movement.cropping,
    "Cropping2D": movement.cropping,
    "Dense": linear.dense,
    "DepthwiseConv1D": linear.depthwise,
    "DepthwiseConv2D": linear.depthwise,
    "Dot": attention.dot,
    "EinsumDense": attention.einsum_dense,
    "Embedding": movement.embedding,
    "Flatten": movement.flatten,
    "GlobalAveragePooling1D": whole_pool(AveragePool2d, 1),
    "GlobalAveragePooling2D": whole_pool(AveragePool2d, 2),
    "GlobalMaxPooling1D": whole_pool(MaxPool2d, 1),
    "GlobalMaxPooling2D": whole_pool(MaxPool2d, 2),
    "GroupNormalization": normalisation.group_normalization,
    "LayerNormalization": normalisation.layer_normalization,
    "MaxPooling1D": pool(MaxPool2d, 1),
    "MaxPooling2D": pool(MaxPool2d, 2),
    "Maximum": merging.merge(BinaryKind.MAXIMUM),
    "Minimum": merging.merge(BinaryKind.MINIMUM),
    "MultiHeadAttention": attention.multi_head_attention,
    "Multiply": merging.merge(BinaryKind.MULTIPLY),
    "Normalization": normalisation.normalization,
    "Permute": movement.permute,
    "RMSNormalization": normalisation.layer_normalization,
    "RepeatVector": movement.repeat_vector,
    "Rescaling": movement.rescaling,
    "Reshape": movement.reshape,
    "Resizing": movement.resizing,
    "SeparableConv1D": linear.separable,
    "SeparableConv2D": linear.separable,
    "Subtract": merging.merge(BinaryKind.SUBTRACT),
    "TFOpLambda": tensorflow_operation,
    "UnitNormalization": normalisation.unit_normalization,
    "UpSampling1D": movement.up_sampling,
    "UpSampling2D": movement.up_sampling,
    "ZeroPadding1D": movement.zero_padding,
    "ZeroPadding2D": movement.zero_padding,
}
"""Every layer Dovetail reads, besides InputLayer, TimeDistributed and models themselves."""
