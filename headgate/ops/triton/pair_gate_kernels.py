"""The Triton kernels of pair-gated attention: one forward, one backward, and a backward in two parts.

A program owns a tile of rows and walks over the columns that its rows see: queries over keys in the forward,
keys over queries in the backward. Scores, gates and their gradients exist only as tiles (rows, columns) in
registers, and the gate's hidden layer one unit at a time, so memory stays linear in T.

The hidden layer is nearly all of the work. `backward` computes it twice, once for the gate and once for its
slopes, and adds up the queries' part atomically, in whatever order programs arrive. The two parts,
`backward_queries` and `backward_keys`, each own what they write, so that results repeat bit for bit; they
compute it four times.

Tensors come with their strides (batch, head, token), the last dimension being contiguous; the halves with
(batch, head, token, unit). Sums are in fp32 whatever the inputs are.
"""

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
LINEAR = tl.constexpr(2 * math.sqrt(2 / math.pi))
CUBIC = tl.constexpr(2 * math.sqrt(2 / math.pi) * 0.044715)
"""gelu(z) = z sigmoid(LINEAR z + CUBIC z^3)"""


@triton.jit
def _tanh(x):
    """In one NVIDIA instruction, to a relative error of 2^-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _share(z, FAST: tl.constexpr):
    """The sigmoid in gelu(z)."""
    if FAST:
        return _tanh(z * (z * z * (CUBIC / 2) + LINEAR / 2)) * 0.5 + 0.5
    return 1 / (1 + tl.exp2(z * (z * z * (-LOG2E * CUBIC) - LOG2E * LINEAR)))


@triton.jit
def _hidden(rows, row_unit, columns, column_unit, m):
    """Unit m of the hidden layer before its activation: (rows, columns)."""
    of_rows = tl.load(rows + m * row_unit).to(tl.float32)
    of_columns = tl.load(columns + m * column_unit).to(tl.float32)
    return of_rows[:, None] + of_columns[None, :]


@triton.jit
def _gate_logits(rows, row_unit, columns, column_unit, w2, b2, M: tl.constexpr, FAST: tl.constexpr):
    logits = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32) + tl.load(b2).to(tl.float32)
    for m in range(M):
        z = _hidden(rows, row_unit, columns, column_unit, m)
        weight = tl.load(w2 + m).to(tl.float32)
        if FAST:  # w2 gelu(z) as two products: its half moves into the weight
            logits += (weight * 0.5) * (z * _tanh(z * (z * z * (CUBIC / 2) + LINEAR / 2)) + z)
        else:
            logits += weight * (z * _share(z, FAST))
    return logits


@triton.jit
def _gated(scores, logits, LOG: tl.constexpr):
    """The gated scores; the gate, and its complement without cancellation."""
    small = tl.exp2(tl.abs(logits) * -LOG2E)
    one = 1 / (1 + small)
    opened = tl.where(logits >= 0, one, small * one)
    closed = tl.where(logits >= 0, small * one, one)
    if LOG:
        gated = scores + (tl.minimum(logits, 0.0) - tl.log2(1 + small) * LN2)
    else:
        gated = scores * opened
    return gated, opened, closed


@triton.jit
def _gradients(scores, logits, seen, top, total, d_weights, delta, LOG: tl.constexpr):
    """The softmax weights, and the gradients of the scores before the gate and of the gate's logits."""
    gated, opened, closed = _gated(scores, logits, LOG)
    weights = tl.where(seen, tl.exp2((gated - top) * LOG2E) / total, 0.0)
    d_gated = weights * (d_weights - delta)
    if LOG:
        return weights, d_gated, d_gated * closed
    d_scores = d_gated * opened
    return weights, d_scores, d_scores * scores * closed


@triton.jit
def _place(t, strides, batch, head):
    return t + batch * strides[0] + head * strides[1]


@triton.jit
def _tile(t, strides, tokens, exists, D: tl.constexpr):
    """Rows `tokens` of a tensor whose batch and head are chosen: (tokens, D)."""
    places = t + tokens.to(tl.int64)[:, None] * strides[2] + tl.arange(0, D)[None, :]
    return tl.load(places, mask=exists[:, None], other=0.0)


@triton.jit
def _halves(t, strides, tokens, count):
    """Where the halves of these tokens begin. After the last token comes the last again, for pairs that
    nothing sees, so that loading needs no mask."""
    return t + tl.minimum(tokens, count - 1).to(tl.int64) * strides[2]


@triton.jit
def _product(a, b, PRECISION: tl.constexpr):
    if PRECISION == "interpreted":  # the interpreter treats the bits of bf16 in a product as whole numbers
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def forward(
    q,
    k,
    v,
    query_half,
    key_half,
    w2,
    b2,
    out,
    softmax,
    q_strides,
    k_strides,
    v_strides,
    query_half_strides,
    key_half_strides,
    out_strides,
    heads,
    repeat,
    queries,
    keys,
    window,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    LOG: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of queries: out (B,H,Tq,D), and softmax (B,H,Tq,2): each query's greatest score and the sum.

    With several programs in the third dimension of the grid each takes its part of the keys, and writes its
    own out and softmax: (parts,B,H,Tq,...).
    """
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # the longest walks start first
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    rows = first + tl.arange(0, ROWS)
    is_row = rows < queries
    q_tile = _tile(_place(q, q_strides, batch, head), q_strides, rows, is_row, D)
    row_half = _halves(_place(query_half, query_half_strides, batch, head), query_half_strides, rows, queries)
    k = _place(k, k_strides, batch, head // repeat)
    v = _place(v, v_strides, batch, head // repeat)
    key_half = _place(key_half, key_half_strides, batch, head)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, D], tl.float32)
    offset = keys - queries
    low = tl.maximum(0, offset + first - window) // COLUMNS * COLUMNS
    high = tl.minimum(keys, offset + first + ROWS)
    part = tl.program_id(2)
    tiles = tl.cdiv(tl.cdiv(high - low, COLUMNS), tl.num_programs(2))
    low += part * tiles * COLUMNS
    for column in range(low, tl.minimum(high, low + tiles * COLUMNS), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        is_column = columns < keys
        k_tile = _tile(k, k_strides, columns, is_column, D)
        v_tile = _tile(v, v_strides, columns, is_column, D)
        column_half = _halves(key_half, key_half_strides, columns, keys)
        scores = _product(q_tile, tl.trans(k_tile), PRECISION) * scale
        logits = _gate_logits(
            row_half,
            query_half_strides[3],
            column_half,
            key_half_strides[3],
            w2 + head * M,
            b2 + head,
            M,
            FAST,
        )
        distance = offset + rows[:, None] - columns[None, :]
        seen = (distance >= 0) & (distance <= window)
        gated = tl.where(seen, _gated(scores, logits, LOG)[0], -float("inf"))
        higher = tl.maximum(top, tl.max(gated, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a row whose keys all come later
        weights = tl.exp2((gated - base[:, None]) * LOG2E)
        shrink = tl.exp2((top - base) * LOG2E)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + _product(weights.to(v_tile.dtype), v_tile, PRECISION)
        top = higher
    out = _place(out, out_strides, batch, head) + rows.to(tl.int64)[:, None] * out_strides[2]
    out += part * out_strides[3]
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + tl.arange(0, D)[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None])
    softmax += ((part * tl.num_programs(1) + number) * queries + rows) * 2
    tl.store(softmax, top, mask=is_row)
    tl.store(softmax + 1, total, mask=is_row)


@triton.jit
def _slope(z, FAST: tl.constexpr):
    """gelu(z) and its derivative."""
    share = _share(z, FAST)
    gelu = z * share
    return gelu, gelu * ((1 - share) * (z * z * (3 * CUBIC) + LINEAR)) + share


@triton.jit
def backward(
    d_out,
    q,
    k,
    v,
    query_half,
    key_half,
    w2,
    b2,
    softmax,
    delta,
    d_q,
    d_query_half,
    d_k,
    d_v,
    d_key_half,
    d_w2,
    d_b2,
    d_out_strides,
    q_strides,
    k_strides,
    v_strides,
    query_half_strides,
    key_half_strides,
    heads,
    repeat,
    queries,
    keys,
    window,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    LOG: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of keys, transposed: d_k and d_v for each query head (B,H,Tk,D), d_key_half (B,H,Tk,M), and this
    tile's part of d_w2 (B,H,tiles,M) and of d_b2 (B,H,tiles). Added to what is there: d_q (B,H,Tq,D) and
    d_query_half (B,H,M,Tq), in fp32. All are contiguous."""
    first = tl.program_id(0) * ROWS
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    rows = first + tl.arange(0, ROWS)
    is_row = rows < keys
    k_tile = _tile(_place(k, k_strides, batch, head // repeat), k_strides, rows, is_row, D)
    v_tile = _tile(_place(v, v_strides, batch, head // repeat), v_strides, rows, is_row, D)
    row_half = _halves(_place(key_half, key_half_strides, batch, head), key_half_strides, rows, keys)
    q = _place(q, q_strides, batch, head)
    d_out = _place(d_out, d_out_strides, batch, head)
    query_half = _place(query_half, query_half_strides, batch, head)
    w2 += head * M
    units = tl.arange(0, M)
    sum_k = tl.zeros([ROWS, D], tl.float32)
    sum_v = tl.zeros([ROWS, D], tl.float32)
    sum_half = tl.zeros([ROWS, M], tl.float32)
    sum_w2 = tl.zeros([ROWS, M], tl.float32)
    sum_b2 = tl.zeros([ROWS], tl.float32)
    offset = keys - queries
    low = tl.maximum(0, first - offset) // COLUMNS * COLUMNS
    for column in range(low, tl.minimum(queries, first + ROWS + window - offset), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        is_column = columns < queries
        q_tile = _tile(q, q_strides, columns, is_column, D)
        d_tile = _tile(d_out, d_out_strides, columns, is_column, D)
        column_half = _halves(query_half, query_half_strides, columns, queries)
        of_columns = number * queries + columns
        top = tl.load(softmax + of_columns * 2, mask=is_column, other=0.0)[None, :]
        total = tl.load(softmax + of_columns * 2 + 1, mask=is_column, other=1.0)[None, :]
        column_delta = tl.load(delta + of_columns, mask=is_column, other=0.0)[None, :]
        scores = _product(k_tile, tl.trans(q_tile), PRECISION) * scale
        d_weights = _product(v_tile, tl.trans(d_tile), PRECISION)
        logits = _gate_logits(
            row_half, key_half_strides[3], column_half, query_half_strides[3], w2, b2 + head, M, FAST
        )
        distance = offset + columns[None, :] - rows[:, None]
        seen = (distance >= 0) & (distance <= window) & is_column[None, :] & is_row[:, None]
        weights, d_scores, d_logits = _gradients(
            scores, logits, seen, top, total, d_weights, column_delta, LOG
        )
        sum_v += _product(weights.to(d_tile.dtype), d_tile, PRECISION)
        d_scores = d_scores.to(q_tile.dtype)
        sum_k += _product(d_scores, q_tile, PRECISION)
        places = d_q + of_columns[:, None] * D + tl.arange(0, D)[None, :]
        part_q = _product(tl.trans(d_scores), k_tile, PRECISION) * scale
        tl.atomic_add(places, part_q, mask=is_column[:, None], sem="relaxed")
        sum_b2 += tl.sum(d_logits, 1)
        places = d_query_half + number * M * queries + columns
        for m in range(M):
            z = _hidden(row_half, key_half_strides[3], column_half, query_half_strides[3], m)
            gelu, slope = _slope(z, FAST)
            d_unit = d_logits * slope
            of_unit = units[None, :] == m
            sum_half += tl.where(of_unit, tl.sum(d_unit, 1)[:, None], 0.0)
            sum_w2 += tl.where(of_unit, tl.sum(d_logits * gelu, 1)[:, None], 0.0)
            part = tl.sum(d_unit, 0) * tl.load(w2 + m).to(tl.float32)
            tl.atomic_add(places + m * queries, part, mask=is_column, sem="relaxed")
    of_rows = number * keys + rows
    places = of_rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(d_k + places, (sum_k * scale).to(d_k.dtype.element_ty), mask=is_row[:, None])
    tl.store(d_v + places, sum_v.to(d_v.dtype.element_ty), mask=is_row[:, None])
    d_half = sum_half * tl.load(w2 + units).to(tl.float32)[None, :]
    places = d_key_half + of_rows[:, None] * M + units[None, :]
    tl.store(places, d_half.to(d_key_half.dtype.element_ty), mask=is_row[:, None])
    part = number * tl.num_programs(0) + tl.program_id(0)
    tl.store(d_b2 + part, tl.sum(sum_b2, 0))
    tl.store(d_w2 + part * M + units, tl.sum(sum_w2, 0))


@triton.jit
def backward_queries(
    d_out,
    q,
    k,
    v,
    query_half,
    key_half,
    w2,
    b2,
    softmax,
    delta,
    d_q,
    d_query_half,
    d_w2,
    d_b2,
    d_out_strides,
    q_strides,
    k_strides,
    v_strides,
    query_half_strides,
    key_half_strides,
    heads,
    repeat,
    queries,
    keys,
    window,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    LOG: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of queries: d_q (B,H,Tq,D), d_query_half (B,H,Tq,M), both contiguous, and this tile's part of
    d_w2 (B,H,tiles,M) and of d_b2 (B,H,tiles)."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    first = tile * ROWS
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    rows = first + tl.arange(0, ROWS)
    is_row = rows < queries
    q_tile = _tile(_place(q, q_strides, batch, head), q_strides, rows, is_row, D)
    d_tile = _tile(_place(d_out, d_out_strides, batch, head), d_out_strides, rows, is_row, D)
    row_half = _halves(_place(query_half, query_half_strides, batch, head), query_half_strides, rows, queries)
    of_rows = number * queries + rows
    top = tl.load(softmax + of_rows * 2, mask=is_row, other=0.0)[:, None]
    total = tl.load(softmax + of_rows * 2 + 1, mask=is_row, other=1.0)[:, None]
    row_delta = tl.load(delta + of_rows, mask=is_row, other=0.0)[:, None]
    k = _place(k, k_strides, batch, head // repeat)
    v = _place(v, v_strides, batch, head // repeat)
    key_half = _place(key_half, key_half_strides, batch, head)
    w2 += head * M
    units = tl.arange(0, M)
    sum_q = tl.zeros([ROWS, D], tl.float32)
    sum_half = tl.zeros([ROWS, M], tl.float32)
    sum_w2 = tl.zeros([ROWS, M], tl.float32)
    sum_b2 = tl.zeros([ROWS], tl.float32)
    offset = keys - queries
    low = tl.maximum(0, offset + first - window) // COLUMNS * COLUMNS
    for column in range(low, tl.minimum(keys, offset + first + ROWS), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        is_column = columns < keys
        k_tile = _tile(k, k_strides, columns, is_column, D)
        v_tile = _tile(v, v_strides, columns, is_column, D)
        column_half = _halves(key_half, key_half_strides, columns, keys)
        scores = _product(q_tile, tl.trans(k_tile), PRECISION) * scale
        d_weights = _product(d_tile, tl.trans(v_tile), PRECISION)
        logits = _gate_logits(
            row_half, query_half_strides[3], column_half, key_half_strides[3], w2, b2 + head, M, FAST
        )
        distance = offset + rows[:, None] - columns[None, :]
        seen = (distance >= 0) & (distance <= window) & is_row[:, None]
        _, d_scores, d_logits = _gradients(scores, logits, seen, top, total, d_weights, row_delta, LOG)
        sum_q += _product(d_scores.to(k_tile.dtype), k_tile, PRECISION)
        sum_b2 += tl.sum(d_logits, 1)
        for m in range(M):
            z = _hidden(row_half, query_half_strides[3], column_half, key_half_strides[3], m)
            gelu, slope = _slope(z, FAST)
            of_unit = units[None, :] == m
            sum_half += tl.where(of_unit, tl.sum(d_logits * slope, 1)[:, None], 0.0)
            sum_w2 += tl.where(of_unit, tl.sum(d_logits * gelu, 1)[:, None], 0.0)
    places = d_q + of_rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(places, (sum_q * scale).to(d_q.dtype.element_ty), mask=is_row[:, None])
    part = number * tl.num_programs(0) + tile
    tl.store(d_b2 + part, tl.sum(sum_b2, 0))
    tl.store(d_w2 + part * M + units, tl.sum(sum_w2, 0))
    d_half = sum_half * tl.load(w2 + units).to(tl.float32)[None, :]
    places = d_query_half + of_rows[:, None] * M + units[None, :]
    tl.store(places, d_half.to(d_query_half.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def backward_keys(
    d_out,
    q,
    k,
    v,
    query_half,
    key_half,
    w2,
    b2,
    softmax,
    delta,
    d_k,
    d_v,
    d_key_half,
    d_out_strides,
    q_strides,
    k_strides,
    v_strides,
    query_half_strides,
    key_half_strides,
    heads,
    repeat,
    queries,
    keys,
    window,
    scale,
    D: tl.constexpr,
    M: tl.constexpr,
    LOG: tl.constexpr,
    FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A tile of keys, transposed: d_k and d_v for each query head (B,H,Tk,D) and d_key_half (B,H,Tk,M), all
    contiguous."""
    first = tl.program_id(0) * ROWS
    number = tl.program_id(1).to(tl.int64)
    batch, head = number // heads, number % heads
    rows = first + tl.arange(0, ROWS)
    is_row = rows < keys
    k_tile = _tile(_place(k, k_strides, batch, head // repeat), k_strides, rows, is_row, D)
    v_tile = _tile(_place(v, v_strides, batch, head // repeat), v_strides, rows, is_row, D)
    row_half = _halves(_place(key_half, key_half_strides, batch, head), key_half_strides, rows, keys)
    q = _place(q, q_strides, batch, head)
    d_out = _place(d_out, d_out_strides, batch, head)
    query_half = _place(query_half, query_half_strides, batch, head)
    w2 += head * M
    units = tl.arange(0, M)
    sum_k = tl.zeros([ROWS, D], tl.float32)
    sum_v = tl.zeros([ROWS, D], tl.float32)
    sum_half = tl.zeros([ROWS, M], tl.float32)
    offset = keys - queries
    low = tl.maximum(0, first - offset) // COLUMNS * COLUMNS
    for column in range(low, tl.minimum(queries, first + ROWS + window - offset), COLUMNS):
        columns = column + tl.arange(0, COLUMNS)
        is_column = columns < queries
        q_tile = _tile(q, q_strides, columns, is_column, D)
        d_tile = _tile(d_out, d_out_strides, columns, is_column, D)
        column_half = _halves(query_half, query_half_strides, columns, queries)
        of_columns = number * queries + columns
        top = tl.load(softmax + of_columns * 2, mask=is_column, other=0.0)[None, :]
        total = tl.load(softmax + of_columns * 2 + 1, mask=is_column, other=1.0)[None, :]
        column_delta = tl.load(delta + of_columns, mask=is_column, other=0.0)[None, :]
        scores = _product(k_tile, tl.trans(q_tile), PRECISION) * scale
        d_weights = _product(v_tile, tl.trans(d_tile), PRECISION)
        logits = _gate_logits(
            row_half, key_half_strides[3], column_half, query_half_strides[3], w2, b2 + head, M, FAST
        )
        distance = offset + columns[None, :] - rows[:, None]
        seen = (distance >= 0) & (distance <= window) & is_column[None, :]
        weights, d_scores, d_logits = _gradients(
            scores, logits, seen, top, total, d_weights, column_delta, LOG
        )
        sum_v += _product(weights.to(d_tile.dtype), d_tile, PRECISION)
        sum_k += _product(d_scores.to(q_tile.dtype), q_tile, PRECISION)
        for m in range(M):
            z = _hidden(row_half, key_half_strides[3], column_half, query_half_strides[3], m)
            _, slope = _slope(z, FAST)
            sum_half += tl.where(units[None, :] == m, tl.sum(d_logits * slope, 1)[:, None], 0.0)
    of_rows = number * keys + rows
    places = of_rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(d_k + places, (sum_k * scale).to(d_k.dtype.element_ty), mask=is_row[:, None])
    tl.store(d_v + places, sum_v.to(d_v.dtype.element_ty), mask=is_row[:, None])
    d_half = sum_half * tl.load(w2 + units).to(tl.float32)[None, :]
    places = d_key_half + of_rows[:, None] * M + units[None, :]
    tl.store(places, d_half.to(d_key_half.dtype.element_ty), mask=is_row[:, None])
