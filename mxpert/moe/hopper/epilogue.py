"""Epilogues of the Hopper MoE GEMMs: scales, bias, activation, routing weight, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ...device.activation import gated_activation
from ...device.compat import aggregate, async_store, barrier
from ...routing.plan import TOKEN_MASK
from .weight_fragments import feature_layout, gate_and_up, row_pair_layout, row_pairs

LINEAR = "linear"
"""EPILOGUE without an activation, for stage 2 and for partial sums of split-K. The other values of
EPILOGUE are names of activations."""

_LINEAR = gl.constexpr(LINEAR)

_TOKEN_MASK = gl.constexpr(TOKEN_MASK)
"""Bits of a sorted_token_id that hold the token; the upper bits hold its slot."""


@aggregate
class Variant:
    """Variant of the epilogue.

    EPILOGUE: LINEAR or the name of an activation. WEIGHTED: routing weights multiply the outputs
    (LINEAR) or the inputs of the activation. REFERENCE: the reference exponent of all rows; 0 if
    each has its own.
    """

    EPILOGUE: gl.constexpr
    HAS_BIAS: gl.constexpr
    WEIGHTED: gl.constexpr
    REFERENCE: gl.constexpr


@gluon.constexpr_function
def row_reference(WEIGHTS):
    """REFERENCE of the variant for a `GroupWeights`, or None."""
    return 0 if WEIGHTS is None else WEIGHTS.reference


@aggregate
class Epilogue:
    """What the epilogue reads from global memory, and its variant.

    reference: [E, row_units * 64], uint8 E8M0 reference exponents of weight rows, or float32
    factors (a `GroupWeights` with row_factors). bias: [E,
    num_outputs], or of gate and up rows [E, 2 * num_outputs]. x_scale, routed_weights: float32 [P],
    one value for each sorted row.
    """

    reference: gl.tensor
    bias: gl.tensor
    num_outputs: gl.tensor
    row_units: gl.tensor
    x_scale: gl.tensor
    routed_weights: gl.tensor
    variant: Variant


@aggregate
class ActivationParameters:
    """Parameters of the activation, float32 scalars or None; see `gated_activation`."""

    p0: gl.tensor
    p1: gl.tensor
    p2: gl.tensor | gl.constexpr


@aggregate
class OutputTerms:
    """Raw terms of a row unit's outputs; with LINEAR, those of `up` are copies.

    References are uint8, biases float32 or the bias's type; one value for each output.
    """

    reference: gl.tensor
    up_reference: gl.tensor
    bias: gl.tensor
    up_bias: gl.tensor


@aggregate
class RowTerms:
    """Scale and routing weight of each activation row, float32 [ROWS]; undefined for padding."""

    scale: gl.tensor
    weight: gl.tensor

    @gluon.jit
    def to_columns(self, LAYOUT: gl.constexpr):
        """Convert from `row_per_thread_layout` to the columns of outputs [outputs, rows]."""
        COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
        return RowTerms(
            scale=gl.convert_layout(self.scale, COLUMNS),
            weight=gl.convert_layout(self.weight, COLUMNS),
        )


@gluon.constexpr_function
def outputs_per_unit(EPILOGUE):
    """Outputs of a row unit of 64 weight rows; an activation makes one of two rows."""
    return 64 if EPILOGUE == LINEAR else 32


@gluon.constexpr_function
def output_layout(ROWS, EPILOGUE):
    """Register layout of the epilogue's outputs [outputs, ROWS]: row pairs or gated features."""
    return row_pair_layout(ROWS) if EPILOGUE == LINEAR else feature_layout(ROWS)


@gluon.constexpr_function
def row_per_thread_layout():
    """1-D layout of a tile's rows with one row per thread of a warpgroup."""
    return gl.BlockedLayout([1], [32], [4], [0])


@gluon.jit
def row_factor(reference):
    """2^(reference - 127 - 6) as float32, or a float32 factor itself.

    HOPPER_FRAGMENT weights always have reference >= 7.
    """
    if reference.dtype == gl.float32:
        return reference
    return ((reference.to(gl.int32) - 6) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _load_bias(pointer, rows, limit, HAS_BIAS: gl.constexpr):
    """Load a bias value per row; 0 past the end or without a bias."""
    if HAS_BIAS:
        return gl.load(pointer + rows, mask=rows < limit, other=0.0)
    else:
        LAYOUT: gl.constexpr = rows.type.layout
        return gl.zeros([rows.shape[0]], gl.float32, LAYOUT)


@gluon.jit
def _load_reference(pointer, rows, inside, REFERENCE: gl.constexpr):
    """Load the reference exponent of each row; all are REFERENCE if that is not 0."""
    if REFERENCE == 0:
        return gl.load(pointer + rows, mask=inside, other=127)
    else:
        return gl.full([rows.shape[0]], REFERENCE, gl.uint8, rows.type.layout)


@gluon.jit
def load_output_terms(epilogue, expert, first_output, LAYOUT: gl.constexpr):
    """Load references and biases of a row unit's outputs (LINEAR), or of its gate and up rows.

    Raw values are returned; `finish` computes with them, so that nothing waits for the loads here.
    """
    OUTPUTS: gl.constexpr = outputs_per_unit(epilogue.variant.EPILOGUE)
    num_outputs = epilogue.num_outputs
    padded_rows = epilogue.row_units * 64
    output = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LAYOUT))
    reference = epilogue.reference + expert * padded_rows
    inside = output < num_outputs
    if epilogue.variant.EPILOGUE == _LINEAR:
        exponents = _load_reference(reference, output, inside, epilogue.variant.REFERENCE)
        bias = _load_bias(
            epilogue.bias + expert * num_outputs, output, num_outputs, epilogue.variant.HAS_BIAS
        )
        return OutputTerms(reference=exponents, up_reference=exponents, bias=bias, up_bias=bias)
    else:
        bias = epilogue.bias + expert * num_outputs * 2
        gate = 2 * output
        return OutputTerms(
            reference=_load_reference(reference, gate, inside, epilogue.variant.REFERENCE),
            up_reference=_load_reference(reference, gate + 1, inside, epilogue.variant.REFERENCE),
            bias=_load_bias(bias, gate, 2 * num_outputs, epilogue.variant.HAS_BIAS),
            up_bias=_load_bias(bias, gate + 1, 2 * num_outputs, epilogue.variant.HAS_BIAS),
        )


@gluon.jit
def load_row_terms(epilogue, first_row, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load scales and routing weights of a tile's sorted rows, in the 1-D LAYOUT."""
    row = first_row + gl.arange(0, ROWS, layout=LAYOUT)
    scale = gl.load(epilogue.x_scale + row)
    weight = gl.load(epilogue.routed_weights + row) if epilogue.variant.WEIGHTED else scale
    return RowTerms(scale=scale, weight=weight)


@gluon.jit
def load_row_ids(sorted_token_ids, first_row, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the sorted_token_ids of a tile's rows, in the 1-D LAYOUT."""
    return gl.load(sorted_token_ids + first_row + gl.arange(0, ROWS, layout=LAYOUT))


@gluon.jit
def is_real(ids, num_tokens):
    """Mask of the sorted rows that belong to a token, not to padding."""
    return (ids & _TOKEN_MASK) < num_tokens


@gluon.jit
def finish(accumulator, outputs, rows, parameters, epilogue, LAYOUT: gl.constexpr):
    """Compute the outputs [outputs, ROWS] in `LAYOUT` from the accumulator [64, ROWS].

    outputs: OutputTerms. rows: RowTerms. LINEAR: ``weight * (sum * factors + bias)``. Otherwise the
    activation of gate and up, whose inputs the routing weight multiplies.
    """
    factor = row_factor(outputs.reference)
    up_factor = row_factor(outputs.up_reference)
    scale = rows.scale
    if epilogue.variant.EPILOGUE == _LINEAR:
        value = row_pairs(accumulator, LAYOUT)  # [64, ROWS] float32
        value = value * factor[:, None] * scale[None, :] + outputs.bias[:, None]
        if epilogue.variant.WEIGHTED:
            value = value * rows.weight[None, :]
        return value
    else:
        gate, up = gate_and_up(accumulator, LAYOUT)  # [32, ROWS] float32 each
        if epilogue.variant.WEIGHTED:
            scale = scale * rows.weight
        gate = gate * factor[:, None] * scale[None, :] + outputs.bias[:, None]
        up = up * up_factor[:, None] * scale[None, :] + outputs.up_bias[:, None]
        return gated_activation(
            gate, up, parameters.p0, parameters.p1, parameters.p2, epilogue.variant.EPILOGUE
        )


@gluon.jit
def store_rows(value, real, out, first_row, first_output, num_outputs):
    """Store value [outputs, rows] to out[row, output] for rows that are `real`."""
    LAYOUT: gl.constexpr = value.type.layout
    output = first_output + gl.arange(0, value.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    row = first_row + gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    pointer = out + row.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(
        pointer,
        value.to(out.dtype.element_ty),
        mask=real[None, :] & (output < num_outputs)[:, None],
    )


@gluon.jit
def _halves(value):
    """Split a value [outputs, rows] into the first and the second half of the rows."""
    OUTPUTS: gl.constexpr = value.shape[0]
    ROWS: gl.constexpr = value.shape[1]
    return value.reshape([OUTPUTS, 2, ROWS // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store_subtile(value, out_desc, staging, first_row, first_output, SUBTILE: gl.constexpr):
    """Start the TMA store of one subtile of a tile, value [outputs, rows of a buffer]."""
    BUFFERS: gl.constexpr = staging.shape[0]
    if SUBTILE == 0 or SUBTILE >= BUFFERS:  # wait until TMA has read this buffer's last data
        tma.store_wait(0 if SUBTILE == 0 else BUFFERS - 1)
        barrier()  # only the thread that starts the stores can wait for them
    rows = staging.index(SUBTILE % BUFFERS)
    rows.store(value.to(out_desc.dtype).permute((1, 0)))  # [rows, outputs]
    fence_async_shared()
    async_store(out_desc, [first_row, first_output], rows)


@gluon.jit
def store_subtiles(value, out_desc, staging, first_row, first_output, SUBTILE: gl.constexpr):
    """Store value [outputs, rows] to rows of `out` from first_row on, by TMA through `staging`.

    A subtile holds the rows of one staging buffer [rows, outputs]. SUBTILE: number of subtiles of
    the same tile stored before. Padding rows are written, too. TMA clips outputs past the last one.
    """
    ROWS: gl.constexpr = staging.shape[1]
    SUBTILES: gl.constexpr = value.shape[1] // ROWS
    gl.static_assert(SUBTILES <= 4, "values of up to four subtiles")
    if SUBTILES == 1:
        _store_subtile(value, out_desc, staging, first_row, first_output, SUBTILE)
    else:
        left, right = _halves(value)
        HALF: gl.constexpr = SUBTILES // 2
        store_subtiles(left, out_desc, staging, first_row, first_output, SUBTILE)
        store_subtiles(
            right, out_desc, staging, first_row + HALF * ROWS, first_output, SUBTILE + HALF
        )
