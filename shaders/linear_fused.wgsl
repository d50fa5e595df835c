// norm_linear, quantize_linear, glu_linear, merge_linear: norm, quantize, glu or the merge of attention, and the ternary
// product that follows, for one token, in one dispatch.
// Every workgroup makes the integer activations anew, which costs less than a dispatch of their own for one token.
//
//   v[i]       = x[i], or act(gate[i]) * up[i] with ACT (formulas of normalize.wgsl), or with MERGE what
//                attention_merge.wgsl makes of at most four parts, with the same roundings
//   a[i]       = v * gain[i] / sqrt(mean(v^2) + eps) with NORM, else v
//   q, x_scale = integers of a (BitNet absmax: 127 or 32639 steps, 1e-5 at least), as in normalize.wgsl
//   y[n]       = ternary product of q and w, as in linear_ternary.wgsl
//
// x       vec4<f32> [K/4]               read        with ACT [2, K/4], gate first; with MERGE parts
//                                                    [HEADS, CHUNKS, HEAD_DIM/4 + 1]
// gain    vec4<f32> [K/4]               read        GAIN only
// w       vec4<u32> [N, BLOCKS]         read        16 two-bit codes a word
// scales  u32 [SCALE_WORDS]             read        f32 [N], or f16 [N, GROUPS] two a word
// bias    f32 [OUT_N]                   read        BIAS only
// y       f32 [OUT_N]                   read_write  this piece writes columns first_row .. first_row + n - 1
//
// ROWS rows a workgroup, folded over x and y; threads and rows as in linear_ternary.wgsl. K is a multiple of 4, BLOCKS =
// ceil(K/64). The integers lie in workgroup memory: BLOCKS * 64 bytes a plane, with the sums at most 12096 bytes, and 4 KiB
// more. K is at most 128 * WORKGROUP. ROWS is a multiple of 4, WORKGROUP a multiple of 16 of at most 256. Needs
// packed_4x8_integer_dot_product.

const A16: u32 = 2u;
const SILU: u32 = 1u;
const RELU2: u32 = 2u;
const ABSMAX_FLOOR: f32 = 1e-5;
const INFINITY_BITS: u32 = 0x7f800000u;

override WORKGROUP: u32 = 256;
override ROWS: u32 = 24;
override N: u32 = 1;
override K: u32 = 4;
override EPS: f32 = 0.0;
override Q_VECTORS: u32 = 4;
override BLOCKS: u32 = 1;
override GROUPS: u32 = 1;
override GROUP_BLOCKS: u32 = 1;
override FIRST_ROW: u32 = 0;
override ACTIVATION: u32 = 1;
override SCALE_GROUP: u32 = 0;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;
override ACT: u32 = 0;
override MERGE: u32 = 0;
override HEADS: u32 = 1;
override HEAD_DIM: u32 = 4;
override CHUNKS: u32 = 1;
override NORM: u32 = 0;
override GAIN: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> gain: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<u32>;
@group(0) @binding(6) var<storage, read> bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

// [block, plane, quarter of the block]
var<workgroup> q: array<vec4<u32>, Q_VECTORS>;
var<workgroup> q_sums: array<atomic<i32>, BLOCKS>;
var<workgroup> x_scale: f32;
// Bit patterns of i32 (by row) or f32 (by group), one component a row; before that, sums of squares and maxima.
var<workgroup> partial: array<vec4<u32>, WORKGROUP>;
var<workgroup> sixteen: array<vec2<u32>, 16>;

// By integer arithmetic, for a device may flush subnormal halves; infinity and NaN occur in no pack.
fn half(h: u32) -> f32 {
    let magnitude = select(bitcast<f32>(((h & 0x7fffu) << 13u) + 0x38000000u), f32(h & 0x3ffu) * 0x1p-24,
                           (h & 0x7c00u) == 0u);
    return select(magnitude, -magnitude, (h & 0x8000u) != 0u);
}

fn group_scale(row: u32, block: u32) -> f32 {
    let index = row * GROUPS + block / GROUP_BLOCKS;
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

fn unpack(word: u32) -> vec4<u32> {
    return vec4<u32>(word, word >> 2u, word >> 4u, word >> 6u) & vec4<u32>(0x03030303u);
}

fn dot16(c: vec4<u32>, v: vec4<u32>) -> i32 {
    return dot4I8Packed(c.x, v.x) + dot4I8Packed(c.y, v.y) + dot4I8Packed(c.z, v.z) + dot4I8Packed(c.w, v.w);
}

// Sixteen columns of four rows, four codes a word.
struct Codes {
    r0: vec4<u32>,
    r1: vec4<u32>,
    r2: vec4<u32>,
    r3: vec4<u32>,
}

fn dots(c: Codes, v: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(dot16(c.r0, v), dot16(c.r1, v), dot16(c.r2, v), dot16(c.r3, v));
}

fn add_partials(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    if (SCALE_GROUP == 1u) {
        return bitcast<vec4<u32>>(bitcast<vec4<f32>>(a) + bitcast<vec4<f32>>(b));
    }
    return a + b;
}

fn planes() -> u32 {
    return select(1u, 2u, ACTIVATION == A16);
}

fn activate(g: vec4<f32>) -> vec4<f32> {
    if (ACT == RELU2) {
        let positive = max(g, vec4<f32>(0.0));
        return positive * positive;
    }
    var z = g;
    if (ACT != SILU) {
        z = 1.5957691216 * (g + 0.044715 * g * g * g);
    }
    // Beyond -87 the quotient is zero to f32; the bound keeps exp() finite.
    return g / (1.0 + exp(min(-z, vec4<f32>(87.0))));
}

// Four dimensions of the attention, from parts of 64 keys, in the order of attention_merge.wgsl.
fn merged(quad: u32) -> vec4<f32> {
    let quads = HEAD_DIM / 4u;
    let first = quad / quads * CHUNKS * (quads + 1u);
    let last = step.x / 64u;
    // All loads at once: what is beyond the last part repeats it and is not used.
    let at = vec4<u32>(first) + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last)) * (quads + 1u);
    let own = at + quad % quads;
    let p0 = x[own.x];
    let p1 = x[own.y];
    let p2 = x[own.z];
    let p3 = x[own.w];
    let s0 = x[at.x + quads];
    let s1 = x[at.y + quads];
    let s2 = x[at.z + quads];
    let s3 = x[at.w + quads];
    let largest = max(max(s0.x, s1.x), max(s2.x, s3.x));
    let f = exp(vec4<f32>(s0.x, s1.x, s2.x, s3.x) - largest);
    var sum = fma(vec4<f32>(f.x), p0, vec4<f32>(0.0));
    var total = fma(f.x, s0.y, 0.0);
    if (last > 0u) {
        sum = fma(vec4<f32>(f.y), p1, sum);
        total = fma(f.y, s1.y, total);
    }
    if (last > 1u) {
        sum = fma(vec4<f32>(f.z), p2, sum);
        total = fma(f.z, s2.y, total);
    }
    if (last > 2u) {
        sum = fma(vec4<f32>(f.w), p3, sum);
        total = fma(f.w, s3.y, total);
    }
    return sum / total;
}

// v of four columns.
fn value(quad: u32) -> vec4<f32> {
    if (MERGE == 1u) {
        return merged(quad);
    }
    if (ACT == 0u) {
        return x[quad];
    }
    return activate(x[quad]) * x[quad + K / 4u];
}

fn gained(v: vec4<f32>, quad: u32) -> vec4<f32> {
    if (GAIN == 1u) {
        return v * gain[quad];
    }
    return v;
}

struct Totals {
    squares: f32,
    max_bits: u32,
}

// Every thread gets the totals. The largest |v| is taken over bit patterns, where NaN is above infinity.
fn reduce(thread: u32, sum: f32, max_bits: u32) -> Totals {
    partial[thread] = vec4<u32>(bitcast<u32>(sum), max_bits, 0u, 0u);
    workgroupBarrier();
    // All threads alike, sixteen of each sum: the loads of a loop of known length overlap.
    var s = 0.0;
    var m = 0u;
    for (var i = thread % 16u; i < WORKGROUP; i += 16u) {
        s += bitcast<f32>(partial[i].x);
        m = max(m, partial[i].y);
    }
    if (thread < 16u) {
        sixteen[thread] = vec2<u32>(bitcast<u32>(s), m);
    }
    workgroupBarrier();
    var totals = Totals(0.0, 0u);
    for (var i = 0u; i < 16u; i++) {
        totals.squares += bitcast<f32>(sixteen[i].x);
        totals.max_bits = max(totals.max_bits, sixteen[i].y);
    }
    return totals;
}

fn pack_bytes(v: vec4<i32>) -> u32 {
    let b = bitcast<vec4<u32>>(v) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

fn integer_limit() -> f32 {
    return select(127.0, 32639.0, ACTIVATION == A16);
}

// Four columns of the integers into workgroup memory.
fn store_quad(quad: u32, v: vec4<f32>, to_integer: f32) {
    if (quad >= BLOCKS * 16u) {
        return;
    }
    let limit = integer_limit();
    let lowest = select(-128.0, -32639.0, ACTIVATION == A16);
    let n = vec4<i32>(clamp(round(v * to_integer), vec4<f32>(lowest), vec4<f32>(limit)));
    let block = quad >> 4u;
    let at = block * planes() * 4u + ((quad >> 2u) & 3u);
    if (ACTIVATION == A16) {
        let low = ((n + 128) & vec4<i32>(255)) - 128;
        q[at][quad & 3u] = pack_bytes((n - low) >> vec4<u32>(8u));
        q[at + 4u][quad & 3u] = pack_bytes(low);
    } else {
        q[at][quad & 3u] = pack_bytes(n);
    }
    atomicAdd(&q_sums[block], n.x + n.y + n.z + n.w);
}

// Zero beyond the columns.
fn value_or_zero(quad: u32) -> vec4<f32> {
    if (quad < K / 4u) {
        return value(quad);
    }
    return vec4<f32>(0.0);
}

fn largest(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// The integers into workgroup memory. `q_sums` are zero before.
fn quantize(thread: u32) {
    let last = K / 4u - 1u;
    // The first three rounds stay in registers; what is beyond is read, and activated, twice.
    let quads = vec3<u32>(thread) + vec3<u32>(0u, WORKGROUP, 2u * WORKGROUP);
    var v0 = value_or_zero(quads.x);
    var v1 = vec4<f32>(0.0);
    var v2 = vec4<f32>(0.0);
    var squares = dot(v0, v0);
    v0 = gained(v0, min(quads.x, last));
    var max_bits = largest(v0);
    if (BLOCKS * 16u > WORKGROUP) {
        v1 = value_or_zero(quads.y);
        v2 = value_or_zero(quads.z);
        squares += dot(v1, v1);
        squares += dot(v2, v2);
        v1 = gained(v1, min(quads.y, last));
        v2 = gained(v2, min(quads.z, last));
        max_bits = max(max_bits, max(largest(v1), largest(v2)));
    }
    for (var quad = quads.z + WORKGROUP; quad <= last; quad += WORKGROUP) {
        let v = value(quad);
        squares += dot(v, v);
        max_bits = max(max_bits, largest(gained(v, quad)));
    }
    let totals = reduce(thread, squares, max_bits);
    var factor = 1.0;
    if (NORM == 1u) {
        factor = inverseSqrt(totals.squares / f32(K) + EPS);
    }
    let limit = integer_limit();
    let absmax = max(bitcast<f32>(totals.max_bits) * factor, ABSMAX_FLOOR);
    let to_integer = limit / absmax;
    if (thread == 0u) {
        x_scale = select(absmax / limit, bitcast<f32>(totals.max_bits), totals.max_bits >= INFINITY_BITS);
    }
    store_quad(quads.x, v0 * factor, to_integer);
    if (BLOCKS * 16u > WORKGROUP) {
        store_quad(quads.y, v1 * factor, to_integer);
        store_quad(quads.z, v2 * factor, to_integer);
    }
    for (var quad = quads.z + WORKGROUP; quad < BLOCKS * 16u; quad += WORKGROUP) {
        store_quad(quad, gained(value_or_zero(quad), min(quad, last)) * factor, to_integer);
    }
}

// Sixteen columns, word `word` of a block.
fn word_dots(c: Codes, block: u32, word: u32) -> vec4<i32> {
    let at = block * planes() * 4u + word;
    if (ACTIVATION == A16) {
        return dots(c, q[at]) * 256 + dots(c, q[at + 4u]);
    }
    return dots(c, q[at]);
}

// The sums of a block of four rows, less those of its activations.
fn block_dots(w0: vec4<u32>, w1: vec4<u32>, w2: vec4<u32>, w3: vec4<u32>, block: u32) -> vec4<i32> {
    return word_dots(Codes(unpack(w0.x), unpack(w1.x), unpack(w2.x), unpack(w3.x)), block, 0u)
        + word_dots(Codes(unpack(w0.y), unpack(w1.y), unpack(w2.y), unpack(w3.y)), block, 1u)
        + word_dots(Codes(unpack(w0.z), unpack(w1.z), unpack(w2.z), unpack(w3.z)), block, 2u)
        + word_dots(Codes(unpack(w0.w), unpack(w1.w), unpack(w2.w), unpack(w3.w)), block, 3u)
        - vec4<i32>(atomicLoad(&q_sums[block]));
}

fn group_scales(rows: vec4<u32>, block: u32) -> vec4<f32> {
    return vec4<f32>(group_scale(rows.x, block), group_scale(rows.y, block),
                     group_scale(rows.z, block), group_scale(rows.w, block));
}

fn write(row: u32, sum: u32) {
    var value: f32;
    if (SCALE_GROUP == 1u) {
        value = bitcast<f32>(sum) * x_scale;
    } else {
        value = f32(bitcast<i32>(sum)) * x_scale * bitcast<f32>(scales[row]);
    }
    let column = FIRST_ROW + row;
    // Left out, not multiplied by zero: without them the result is products alone, which no compiler
    // may contract, and equals the reference bit for bit.
    if (BIAS == 1u) {
        value += bias[column];
    }
    if (ACCUMULATE == 1u) {
        value += y[column];
    }
    y[column] = value;
}

// The sums of all lanes to y.
fn finish(isum: vec4<i32>, fsum: vec4<f32>, start: u32, end: u32, thread: u32) {
    partial[thread] = select(bitcast<vec4<u32>>(isum), bitcast<vec4<u32>>(fsum), SCALE_GROUP == 1u);
    workgroupBarrier();
    let lanes = min(BLOCKS, WORKGROUP);
    let groups = WORKGROUP / lanes;
    let group = thread / lanes;
    let lane = thread % lanes;
    if (lanes > 16u) {
        if (lane < 16u && group < groups) {
            var sum = partial[thread];
            for (var i = 16u; i < lanes; i += 16u) {
                if (lane + i < lanes) {
                    sum = add_partials(sum, partial[thread + i]);
                }
            }
            partial[thread] = sum;
        }
        workgroupBarrier();
    }
    if (thread < groups * 4u && start + thread < end) {
        let base = (thread / 4u) * lanes;
        var sum = partial[base];
        for (var i = 1u; i < min(lanes, 16u); i++) {
            sum = add_partials(sum, partial[base + i]);
        }
        write(start + thread, sum[thread & 3u]);
    }
    workgroupBarrier();
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let first = (workgroup.x + workgroup.y * workgroups.x) * ROWS;
    if (first >= N) {
        return;
    }
    let end = min(first + ROWS, N);
    let lanes = min(BLOCKS, WORKGROUP);
    let groups = WORKGROUP / lanes;
    let group = thread / lanes;
    let lane = thread % lanes;

    // The first weights are on their way while the activations are made.
    let early = min(vec4<u32>(first + group * 4u) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u)) * BLOCKS + lane;
    var w0 = w[early.x];
    var w1 = w[early.y];
    var w2 = w[early.z];
    var w3 = w[early.w];

    for (var i = thread; i < BLOCKS; i += WORKGROUP) {
        atomicStore(&q_sums[i], 0);
    }
    workgroupBarrier();
    quantize(thread);
    workgroupBarrier();

    for (var start = first; start < end; start += groups * 4u) {
        let row = start + group * 4u;
        var isums = vec4<i32>(0);
        var fsums = vec4<f32>(0.0);
        if (group < groups && row < end) {
            // Rows beyond the last repeat it and are not written.
            let rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
            for (var block = lane; block < BLOCKS; block += lanes) {
                if (start > first || block > lane) {
                    w0 = w[rows.x * BLOCKS + block];
                    w1 = w[rows.y * BLOCKS + block];
                    w2 = w[rows.z * BLOCKS + block];
                    w3 = w[rows.w * BLOCKS + block];
                }
                let s = block_dots(w0, w1, w2, w3, block);
                if (SCALE_GROUP == 1u) {
                    fsums = fma(vec4<f32>(s), group_scales(rows, block), fsums);
                } else {
                    isums += s;
                }
            }
        }
        finish(isums, fsums, start, end, thread);
    }
}
