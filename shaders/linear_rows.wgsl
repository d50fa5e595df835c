// norm_linear_rows, quantize_linear_rows, glu_linear_rows, merge_linear_rows: as linear_fused.wgsl, bit for bit, with
// subgroups, for products with scales by row.
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
// w       vec2<u32> [N, PAIRS]          read        16 two-bit codes a word
// scales  f32 [N]                       read
// bias    f32 [OUT_N]                   read        BIAS only
// y       f32 [OUT_N]                   read_write  this piece writes columns first_row .. first_row + n - 1
//
// ROWS rows a workgroup, folded over x and y. A subgroup takes four rows at a time and needs no barrier for them: its
// lanes share the columns, two words of each row a turn, and add their sums, which are integers, so that neither the size
// of a subgroup nor which threads are in it shows in the result. K is a multiple of 4, PAIRS = 2 ceil(K/64). The integers
// lie in workgroup memory: PAIRS * 32 bytes a plane, at most 12096 bytes, and 2.1 KiB more. K is at most 32 * WORKGROUP.
// ROWS is a multiple of 4, WORKGROUP a multiple of 16 of at most 256. Needs packed_4x8_integer_dot_product and subgroups.

const A16: u32 = 2u;
const SILU: u32 = 1u;
const RELU2: u32 = 2u;
const ABSMAX_FLOOR: f32 = 1e-5;
const INFINITY_BITS: u32 = 0x7f800000u;

override WORKGROUP: u32 = 256;
override ROWS: u32 = 64;
override N: u32 = 1;
override K: u32 = 4;
override EPS: f32 = 0.0;
override Q_VECTORS: u32 = 4;
override FIRST_ROW: u32 = 0;
override ACTIVATION: u32 = 1;
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
@group(0) @binding(4) var<storage, read> w: array<vec2<u32>>;
@group(0) @binding(5) var<storage, read> scales: array<f32>;
@group(0) @binding(6) var<storage, read> bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

// [plane, unit of 16 columns]
var<workgroup> q: array<vec4<u32>, Q_VECTORS>;
var<workgroup> squares: array<f32, WORKGROUP>;
var<workgroup> sixteen: array<f32, 16>;
// Bits of the largest |v|, and the sum of the integers.
var<workgroup> max_bits: atomic<u32>;
var<workgroup> q_sum: atomic<i32>;
var<workgroup> subgroups: atomic<u32>;

fn planes() -> u32 {
    return select(1u, 2u, ACTIVATION == A16);
}

fn units() -> u32 {
    return Q_VECTORS / planes();
}

fn pairs() -> u32 {
    return units() / 2u;
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

// What is loaded for four columns, with their gain: x; gate and up; or of four parts the columns, maxima and sums.
struct Raw {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
    maxima: vec4<f32>,
    sums: vec4<f32>,
    gain: vec4<f32>,
}

// Of the last columns for those beyond.
fn raw(quad: u32) -> Raw {
    let quads = K / 4u;
    let own = min(quad, quads - 1u);
    var r = Raw();
    if (MERGE == 1u) {
        let head_quads = HEAD_DIM / 4u;
        let first = own / head_quads * CHUNKS * (head_quads + 1u);
        // All loads at once: what is beyond the last part repeats it and is not used.
        let last = step.x / 64u;
        let at = vec4<u32>(first) + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(last)) * (head_quads + 1u);
        r.a = x[at.x + own % head_quads];
        r.b = x[at.y + own % head_quads];
        r.c = x[at.z + own % head_quads];
        r.d = x[at.w + own % head_quads];
        let s0 = x[at.x + head_quads];
        let s1 = x[at.y + head_quads];
        let s2 = x[at.z + head_quads];
        let s3 = x[at.w + head_quads];
        r.maxima = vec4<f32>(s0.x, s1.x, s2.x, s3.x);
        r.sums = vec4<f32>(s0.y, s1.y, s2.y, s3.y);
    } else if (ACT != 0u) {
        r.a = x[own];
        r.b = x[quads + own];
    } else {
        r.a = x[own];
    }
    if (GAIN == 1u) {
        r.gain = gain[own];
    }
    return r;
}

// Four dimensions of the attention, from parts of 64 keys, in the order of attention_merge.wgsl.
fn merged(r: Raw) -> vec4<f32> {
    let last = step.x / 64u;
    let m = r.maxima;
    let f = exp(m - max(max(m.x, m.y), max(m.z, m.w)));
    var sum = fma(vec4<f32>(f.x), r.a, vec4<f32>(0.0));
    var total = fma(f.x, r.sums.x, 0.0);
    if (last > 0u) {
        sum = fma(vec4<f32>(f.y), r.b, sum);
        total = fma(f.y, r.sums.y, total);
    }
    if (last > 1u) {
        sum = fma(vec4<f32>(f.z), r.c, sum);
        total = fma(f.z, r.sums.z, total);
    }
    if (last > 2u) {
        sum = fma(vec4<f32>(f.w), r.d, sum);
        total = fma(f.w, r.sums.w, total);
    }
    return sum / total;
}

// v of four columns; zero beyond the last.
fn value_of(r: Raw, quad: u32) -> vec4<f32> {
    var v = r.a;
    if (MERGE == 1u) {
        v = merged(r);
    } else if (ACT != 0u) {
        v = activate(r.a) * r.b;
    }
    return select(vec4<f32>(0.0), v, quad < K / 4u);
}

fn gained(r: Raw, v: vec4<f32>) -> vec4<f32> {
    if (GAIN == 1u) {
        return v * r.gain;
    }
    return v;
}

fn pack_bytes(v: vec4<i32>) -> u32 {
    let b = bitcast<vec4<u32>>(v) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

fn integer_limit() -> f32 {
    return select(127.0, 32639.0, ACTIVATION == A16);
}

// Bits of the largest |v|, where NaN is above infinity.
fn largest(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// What a thread has: sum of squares, bits of the largest.
struct Part {
    squares: f32,
    max_bits: u32,
}

fn add_quad(part: Part, v: vec4<f32>, after: vec4<f32>) -> Part {
    return Part(part.squares + dot(v, v), max(part.max_bits, largest(after)));
}

// Four columns of the integers into workgroup memory; their sum.
fn store_quad(quad: u32, v: vec4<f32>, to_integer: f32) -> i32 {
    if (quad >= 4u * units()) {
        return 0;
    }
    let limit = integer_limit();
    let lowest = select(-128.0, -32639.0, ACTIVATION == A16);
    let n = vec4<i32>(clamp(round(v * to_integer), vec4<f32>(lowest), vec4<f32>(limit)));
    let at = quad >> 2u;
    if (ACTIVATION == A16) {
        let low = ((n + 128) & vec4<i32>(255)) - 128;
        q[at][quad & 3u] = pack_bytes((n - low) >> vec4<u32>(8u));
        q[at + units()][quad & 3u] = pack_bytes(low);
    } else {
        q[at][quad & 3u] = pack_bytes(n);
    }
    return n.x + n.y + n.z + n.w;
}

// The largest over all threads; exact, so in any order.
fn add_max(bits: u32, lane: u32) {
    let all = subgroupMax(bits);
    if (lane == 0u) {
        atomicMax(&max_bits, all);
    }
}

fn add_sum(sum: i32, lane: u32) {
    let all = subgroupAdd(sum);
    if (lane == 0u) {
        atomicAdd(&q_sum, all);
    }
}

// The sum of squares of all threads, in the order of normalize.wgsl. Barriers before and after.
fn sum_squares(thread: u32) -> f32 {
    var s = 0.0;
    for (var i = thread % 16u; i < WORKGROUP; i += 16u) {
        s += squares[i];
    }
    if (thread < 16u) {
        sixteen[thread] = s;
    }
    workgroupBarrier();
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) {
        sum += sixteen[i];
    }
    return sum;
}

struct Factors {
    norm: f32,
    to_integer: f32,
}

fn factors_of(squares: f32, bits: u32) -> Factors {
    let norm = select(1.0, inverseSqrt(squares / f32(K) + EPS), NORM == 1u);
    return Factors(norm, integer_limit() / max(bitcast<f32>(bits) * norm, ABSMAX_FLOOR));
}

fn scale_of(squares: f32) -> f32 {
    let bits = atomicLoad(&max_bits);
    let norm = factors_of(squares, bits).norm;
    return select(max(bitcast<f32>(bits) * norm, ABSMAX_FLOOR) / integer_limit(), bitcast<f32>(bits),
                  bits >= INFINITY_BITS);
}

// The columns of a round after their gain, and the part of the thread with them.
struct Kept {
    v: vec4<f32>,
    part: Part,
}

fn keep(part: Part, r: Raw, quad: u32) -> Kept {
    let v = value_of(r, quad);
    let after = gained(r, v);
    return Kept(after, add_quad(part, v, after));
}

// Whether a round of the threads has columns.
fn has_round(round: u32) -> bool {
    return 4u * units() > round * WORKGROUP;
}

// The integers into workgroup memory: what it reads, it keeps. The sum of squares.
fn quantize(thread: u32, lane: u32) -> f32 {
    // All loads at once.
    let r0 = raw(thread);
    var r1 = Raw();
    if (has_round(1u)) {
        r1 = raw(thread + 1u * WORKGROUP);
    }
    var r2 = Raw();
    if (has_round(2u)) {
        r2 = raw(thread + 2u * WORKGROUP);
    }
    var r3 = Raw();
    if (has_round(3u)) {
        r3 = raw(thread + 3u * WORKGROUP);
    }
    var r4 = Raw();
    if (has_round(4u)) {
        r4 = raw(thread + 4u * WORKGROUP);
    }
    var r5 = Raw();
    if (has_round(5u)) {
        r5 = raw(thread + 5u * WORKGROUP);
    }
    var r6 = Raw();
    if (has_round(6u)) {
        r6 = raw(thread + 6u * WORKGROUP);
    }
    var r7 = Raw();
    if (has_round(7u)) {
        r7 = raw(thread + 7u * WORKGROUP);
    }
    let k0 = keep(Part(0.0, 0u), r0, thread);
    var part = k0.part;
    var k1 = Kept();
    if (has_round(1u)) {
        k1 = keep(part, r1, thread + 1u * WORKGROUP);
        part = k1.part;
    }
    var k2 = Kept();
    if (has_round(2u)) {
        k2 = keep(part, r2, thread + 2u * WORKGROUP);
        part = k2.part;
    }
    var k3 = Kept();
    if (has_round(3u)) {
        k3 = keep(part, r3, thread + 3u * WORKGROUP);
        part = k3.part;
    }
    var k4 = Kept();
    if (has_round(4u)) {
        k4 = keep(part, r4, thread + 4u * WORKGROUP);
        part = k4.part;
    }
    var k5 = Kept();
    if (has_round(5u)) {
        k5 = keep(part, r5, thread + 5u * WORKGROUP);
        part = k5.part;
    }
    var k6 = Kept();
    if (has_round(6u)) {
        k6 = keep(part, r6, thread + 6u * WORKGROUP);
        part = k6.part;
    }
    var k7 = Kept();
    if (has_round(7u)) {
        k7 = keep(part, r7, thread + 7u * WORKGROUP);
        part = k7.part;
    }
    squares[thread] = part.squares;
    add_max(part.max_bits, lane);
    workgroupBarrier();
    let sum = sum_squares(thread);
    let f = factors_of(sum, atomicLoad(&max_bits));
    var q_total = store_quad(thread, k0.v * f.norm, f.to_integer);
    if (has_round(1u)) {
        q_total += store_quad(thread + 1u * WORKGROUP, k1.v * f.norm, f.to_integer);
    }
    if (has_round(2u)) {
        q_total += store_quad(thread + 2u * WORKGROUP, k2.v * f.norm, f.to_integer);
    }
    if (has_round(3u)) {
        q_total += store_quad(thread + 3u * WORKGROUP, k3.v * f.norm, f.to_integer);
    }
    if (has_round(4u)) {
        q_total += store_quad(thread + 4u * WORKGROUP, k4.v * f.norm, f.to_integer);
    }
    if (has_round(5u)) {
        q_total += store_quad(thread + 5u * WORKGROUP, k5.v * f.norm, f.to_integer);
    }
    if (has_round(6u)) {
        q_total += store_quad(thread + 6u * WORKGROUP, k6.v * f.norm, f.to_integer);
    }
    if (has_round(7u)) {
        q_total += store_quad(thread + 7u * WORKGROUP, k7.v * f.norm, f.to_integer);
    }
    add_sum(q_total, lane);
    return sum;
}

// Sixteen columns of four rows, four codes a word.
struct Codes {
    c0: vec4<u32>,
    c1: vec4<u32>,
    c2: vec4<u32>,
    c3: vec4<u32>,
}

fn unpack(words: vec4<u32>) -> Codes {
    let mask = vec4<u32>(0x03030303u);
    return Codes(words & mask, (words >> vec4<u32>(2u)) & mask, (words >> vec4<u32>(4u)) & mask,
                 (words >> vec4<u32>(6u)) & mask);
}

fn dots(c: vec4<u32>, v: u32) -> vec4<i32> {
    return vec4<i32>(dot4I8Packed(c.x, v), dot4I8Packed(c.y, v), dot4I8Packed(c.z, v), dot4I8Packed(c.w, v));
}

fn plane_dots(c: Codes, v: vec4<u32>) -> vec4<i32> {
    return dots(c.c0, v.x) + dots(c.c1, v.y) + dots(c.c2, v.z) + dots(c.c3, v.w);
}

// Sixteen columns, one component a row.
fn unit_dots(words: vec4<u32>, unit: u32) -> vec4<i32> {
    let c = unpack(words);
    if (ACTIVATION == A16) {
        return plane_dots(c, q[unit]) * 256 + plane_dots(c, q[unit + units()]);
    }
    return plane_dots(c, q[unit]);
}

// Two words of four rows: 32 columns.
struct Words {
    first: vec4<u32>,
    second: vec4<u32>,
}

fn words_of(rows: vec4<u32>, pair: u32) -> Words {
    let at = rows * pairs() + min(pair, pairs() - 1u);
    let a = w[at.x];
    let b = w[at.y];
    let c = w[at.z];
    let d = w[at.w];
    return Words(vec4<u32>(a.x, b.x, c.x, d.x), vec4<u32>(a.y, b.y, c.y, d.y));
}

// What a lane loads at once: as many pairs as a row of K columns has for 32 lanes, at most four.
struct Ahead {
    a: Words,
    b: Words,
    c: Words,
    d: Words,
}

fn batch() -> u32 {
    return min((pairs() + 31u) / 32u, 4u);
}

fn load(rows: vec4<u32>, pair: u32, lanes: u32) -> Ahead {
    var all = Ahead();
    all.a = words_of(rows, pair);
    if (batch() > 1u) {
        all.b = words_of(rows, pair + lanes);
    }
    if (batch() > 2u) {
        all.c = words_of(rows, pair + 2u * lanes);
    }
    if (batch() > 3u) {
        all.d = words_of(rows, pair + 3u * lanes);
    }
    return all;
}

// Nothing beyond the last pair: codes of zero, and no branch, so that all lanes are together when they add their sums.
fn pair_dots(words: Words, pair: u32) -> vec4<i32> {
    let inside = pair < pairs();
    let own = min(pair, pairs() - 1u);
    let first = select(vec4<u32>(0u), words.first, inside);
    let second = select(vec4<u32>(0u), words.second, inside);
    return unit_dots(first, 2u * own) + unit_dots(second, 2u * own + 1u);
}

fn loaded_dots(loaded: Ahead, pair: u32, lanes: u32) -> vec4<i32> {
    var s = pair_dots(loaded.a, pair);
    if (batch() > 1u) {
        s += pair_dots(loaded.b, pair + lanes);
    }
    if (batch() > 2u) {
        s += pair_dots(loaded.c, pair + 2u * lanes);
    }
    if (batch() > 3u) {
        s += pair_dots(loaded.d, pair + 3u * lanes);
    }
    return s;
}

// What a row needs beside its sums, which is loaded before them: its scale, its bias, and what is in y.
struct Row {
    scale: f32,
    bias: f32,
    y: f32,
}

// Of the row that a lane writes; the first lanes write one each.
fn row_of(row: u32, lane: u32) -> Row {
    var own = Row();
    let at = min(row + min(lane, 3u), N - 1u);
    let column = FIRST_ROW + at;
    own.scale = scales[at];
    if (BIAS == 1u) {
        own.bias = bias[column];
    }
    if (ACCUMULATE == 1u) {
        own.y = y[column];
    }
    return own;
}

// The sums of all lanes, of the rows from `row` on, to y. A subgroup has at least four lanes.
fn write(own: vec4<i32>, row: u32, end: u32, lane: u32, x_scale: f32, rest: Row) {
    let all = subgroupAdd(own) - vec4<i32>(atomicLoad(&q_sum));
    if (lane < 4u && row + lane < end) {
        let sum = select(select(all.x, all.y, lane == 1u), select(all.z, all.w, lane == 3u), lane > 1u);
        var value = f32(sum) * x_scale * rest.scale;
        // Left out, not multiplied by zero: without them the result is products alone, which no compiler
        // may contract, and equals the reference bit for bit.
        if (BIAS == 1u) {
            value += rest.bias;
        }
        if (ACCUMULATE == 1u) {
            value += rest.y;
        }
        y[FIRST_ROW + row + lane] = value;
    }
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
    if (thread == 0u) {
        atomicStore(&max_bits, 0u);
        atomicStore(&q_sum, 0);
        atomicStore(&subgroups, 0u);
    }
    workgroupBarrier();
    let lanes = subgroupAdd(1u);
    let lane = subgroupExclusiveAdd(1u);
    var ticket = 0u;
    if (lane == 0u) {
        ticket = atomicAdd(&subgroups, 1u);
    }
    let subgroup = subgroupBroadcastFirst(ticket);
    // Rows beyond the last repeat it and are not written.
    let last = vec4<u32>(N - 1u);
    var row = first + 4u * subgroup;
    var rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), last);
    // The first weights are on their way while the activations are made.
    var loaded = load(rows, lane, lanes);
    var rest = row_of(row, lane);

    let squared = quantize(thread, lane);
    workgroupBarrier();
    let x_scale = scale_of(squared);
    let count = atomicLoad(&subgroups);
    let rounds = (ROWS + 4u * count - 1u) / (4u * count);
    for (var round = 0u; round < rounds; round++) {
        if (round > 0u) {
            row += 4u * count;
            rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), last);
            loaded = load(rows, lane, lanes);
            rest = row_of(row, lane);
        }
        var sums = loaded_dots(loaded, lane, lanes);
        for (var start = batch() * lanes; start < pairs(); start += batch() * lanes) {
            sums += loaded_dots(load(rows, start + lane, lanes), start + lane, lanes);
        }
        write(sums, row, end, lane, x_scale, rest);
    }
}
