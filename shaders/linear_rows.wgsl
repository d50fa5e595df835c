// norm_linear_rows, quantize_linear_rows, glu_linear_rows, merge_linear_rows: as linear_fused.wgsl, bit for bit, with
// subgroups, for products with scales by row.
//
//   v[t, i]    = x[t, i], or act(gate[t, i]) * up[t, i] with ACT (formulas of normalize.wgsl), or with MERGE what
//                attention_merge.wgsl makes of at most four parts, with the same roundings
//   a[t, i]    = v * gain[i] / sqrt(mean(v^2) + eps) with NORM, else v
//   q, x_scale = integers of a (BitNet absmax: 127 or 32639 steps, 1e-5 at least), as in normalize.wgsl
//   y[t, n]    = ternary product of q and w, as in linear_ternary.wgsl
//
// x       vec4<f32> [T, K/4]            read        with ACT [T, 2, K/4], gate first; with MERGE parts
//                                                    [T, HEADS, CHUNKS, HEAD_DIM/4 + 1]
// gain    vec4<f32> [K/4]               read        GAIN only
// w       vec2<u32> [N, PAIRS]          read        16 two-bit codes a word
// scales  f32 [N]                       read
// bias    f32 [OUT_N]                   read        BIAS only
// y       f32 [T, OUT_N]                read_write  this piece writes columns first_row .. first_row + n - 1
//
// ROWS rows a workgroup, folded over x and y. A subgroup takes four rows at a time and needs no barrier for them: its
// lanes share the columns, two words of each row a turn, and add their sums, which are integers, so that neither the size
// of a subgroup nor which threads are in it shows in the result. K is a multiple of 4, PAIRS = 2 ceil(K/64). T is
// step.tokens, at most TOKENS, at most 4. The integers lie in workgroup memory: TOKENS * PAIRS * 32 bytes a plane, at most 12096
// bytes, and 4.3 KiB more. K is at most 32 * WORKGROUP. ROWS is a multiple of 4, WORKGROUP a multiple of 16 of
// at most 256. Needs packed_4x8_integer_dot_product and subgroups.

const A16: u32 = 2u;
const SILU: u32 = 1u;
const RELU2: u32 = 2u;
const ABSMAX_FLOOR: f32 = 1e-5;
const INFINITY_BITS: u32 = 0x7f800000u;

override WORKGROUP: u32 = 256;
override ROWS: u32 = 64;
override TOKENS: u32 = 1;
override N: u32 = 1;
override K: u32 = 4;
override EPS: f32 = 0.0;
override Q_VECTORS: u32 = 4;
override FIRST_ROW: u32 = 0;
override OUT_STRIDE: u32 = 1;
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

// [token, plane, unit of 16 columns]
var<workgroup> q: array<vec4<u32>, TOKENS * Q_VECTORS>;
// Sums of squares, one component for each of four tokens.
var<workgroup> squares: array<vec4<f32>, WORKGROUP>;
var<workgroup> sixteen: array<vec4<f32>, 16>;
// Of each token: bits of the largest |v|, and the sum of its integers.
var<workgroup> max_bits: array<atomic<u32>, TOKENS>;
var<workgroup> q_sum: array<atomic<i32>, TOKENS>;
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
fn raw(token: u32, quad: u32) -> Raw {
    let quads = K / 4u;
    let own = min(quad, quads - 1u);
    var r = Raw();
    if (MERGE == 1u) {
        let head_quads = HEAD_DIM / 4u;
        let first = (token * HEADS + own / head_quads) * CHUNKS * (head_quads + 1u);
        // All loads at once: what is beyond the last part repeats it and is not used.
        let last = (step.x + token) / 64u;
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
        r.a = x[2u * token * quads + own];
        r.b = x[(2u * token + 1u) * quads + own];
    } else {
        r.a = x[token * quads + own];
    }
    if (GAIN == 1u) {
        r.gain = gain[own];
    }
    return r;
}

// Four dimensions of the attention of a token, from parts of 64 keys, in the order of attention_merge.wgsl.
fn merged(r: Raw, token: u32) -> vec4<f32> {
    let last = (step.x + token) / 64u;
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
fn value_of(r: Raw, token: u32, quad: u32) -> vec4<f32> {
    var v = r.a;
    if (MERGE == 1u) {
        v = merged(r, token);
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

// What a thread has of a token: sum of squares, bits of the largest.
struct Part {
    squares: f32,
    max_bits: u32,
}

fn add_quad(part: Part, v: vec4<f32>, after: vec4<f32>) -> Part {
    return Part(part.squares + dot(v, v), max(part.max_bits, largest(after)));
}

// Four columns of the integers into workgroup memory; their sum.
fn store_quad(token: u32, quad: u32, v: vec4<f32>, to_integer: f32) -> i32 {
    if (quad >= 4u * units()) {
        return 0;
    }
    let limit = integer_limit();
    let lowest = select(-128.0, -32639.0, ACTIVATION == A16);
    let n = vec4<i32>(clamp(round(v * to_integer), vec4<f32>(lowest), vec4<f32>(limit)));
    let at = token * Q_VECTORS + (quad >> 2u);
    if (ACTIVATION == A16) {
        let low = ((n + 128) & vec4<i32>(255)) - 128;
        q[at][quad & 3u] = pack_bytes((n - low) >> vec4<u32>(8u));
        q[at + units()][quad & 3u] = pack_bytes(low);
    } else {
        q[at][quad & 3u] = pack_bytes(n);
    }
    return n.x + n.y + n.z + n.w;
}

// The largest of a token over all threads; exact, so in any order.
fn add_max(token: u32, bits: u32, lane: u32) {
    let all = subgroupMax(bits);
    if (lane == 0u) {
        atomicMax(&max_bits[token], all);
    }
}

fn add_sum(token: u32, sum: i32, lane: u32) {
    let all = subgroupAdd(sum);
    if (lane == 0u) {
        atomicAdd(&q_sum[token], all);
    }
}

// The sums of squares of four tokens, in the order of normalize.wgsl. Barriers before and after.
fn sum_squares(thread: u32) -> vec4<f32> {
    var s = vec4<f32>(0.0);
    for (var i = thread % 16u; i < WORKGROUP; i += 16u) {
        s += squares[i];
    }
    if (thread < 16u) {
        sixteen[thread] = s;
    }
    workgroupBarrier();
    var sum = vec4<f32>(0.0);
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

fn scale_of(token: u32, squares: f32) -> f32 {
    let bits = atomicLoad(&max_bits[min(token, TOKENS - 1u)]);
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
    let v = value_of(r, 0u, quad);
    let after = gained(r, v);
    return Kept(after, add_quad(part, v, after));
}

// Whether a round of the threads has columns.
fn has_round(round: u32) -> bool {
    return 4u * units() > round * WORKGROUP;
}

// The integers of one token into workgroup memory: what it reads, it keeps. The sum of squares.
fn quantize_one(thread: u32, lane: u32) -> f32 {
    // All loads at once.
    let r0 = raw(0u, thread);
    var r1 = Raw();
    if (has_round(1u)) {
        r1 = raw(0u, thread + 1u * WORKGROUP);
    }
    var r2 = Raw();
    if (has_round(2u)) {
        r2 = raw(0u, thread + 2u * WORKGROUP);
    }
    var r3 = Raw();
    if (has_round(3u)) {
        r3 = raw(0u, thread + 3u * WORKGROUP);
    }
    var r4 = Raw();
    if (has_round(4u)) {
        r4 = raw(0u, thread + 4u * WORKGROUP);
    }
    var r5 = Raw();
    if (has_round(5u)) {
        r5 = raw(0u, thread + 5u * WORKGROUP);
    }
    var r6 = Raw();
    if (has_round(6u)) {
        r6 = raw(0u, thread + 6u * WORKGROUP);
    }
    var r7 = Raw();
    if (has_round(7u)) {
        r7 = raw(0u, thread + 7u * WORKGROUP);
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
    squares[thread] = vec4<f32>(part.squares, 0.0, 0.0, 0.0);
    add_max(0u, part.max_bits, lane);
    workgroupBarrier();
    let sum = sum_squares(thread).x;
    let f = factors_of(sum, atomicLoad(&max_bits[0]));
    var q_total = store_quad(0u, thread, k0.v * f.norm, f.to_integer);
    if (has_round(1u)) {
        q_total += store_quad(0u, thread + 1u * WORKGROUP, k1.v * f.norm, f.to_integer);
    }
    if (has_round(2u)) {
        q_total += store_quad(0u, thread + 2u * WORKGROUP, k2.v * f.norm, f.to_integer);
    }
    if (has_round(3u)) {
        q_total += store_quad(0u, thread + 3u * WORKGROUP, k3.v * f.norm, f.to_integer);
    }
    if (has_round(4u)) {
        q_total += store_quad(0u, thread + 4u * WORKGROUP, k4.v * f.norm, f.to_integer);
    }
    if (has_round(5u)) {
        q_total += store_quad(0u, thread + 5u * WORKGROUP, k5.v * f.norm, f.to_integer);
    }
    if (has_round(6u)) {
        q_total += store_quad(0u, thread + 6u * WORKGROUP, k6.v * f.norm, f.to_integer);
    }
    if (has_round(7u)) {
        q_total += store_quad(0u, thread + 7u * WORKGROUP, k7.v * f.norm, f.to_integer);
    }
    add_sum(0u, q_total, lane);
    return sum;
}

// What is loaded for four columns of four tokens.
struct Raws {
    a: Raw,
    b: Raw,
    c: Raw,
    d: Raw,
}

fn raws(t: vec4<u32>, quad: u32) -> Raws {
    return Raws(raw(t.x, quad), raw(t.y, quad), raw(t.z, quad), raw(t.w, quad));
}

// Four columns of four tokens after their gain, and the parts of the thread with them.
struct Four {
    a: vec4<f32>,
    b: vec4<f32>,
    c: vec4<f32>,
    d: vec4<f32>,
    pa: Part,
    pb: Part,
    pc: Part,
    pd: Part,
}

fn add_four(old: Four, r: Raws, t: vec4<u32>, quad: u32) -> Four {
    let a = value_of(r.a, t.x, quad);
    let b = value_of(r.b, t.y, quad);
    let c = value_of(r.c, t.z, quad);
    let d = value_of(r.d, t.w, quad);
    let ga = gained(r.a, a);
    let gb = gained(r.b, b);
    let gc = gained(r.c, c);
    let gd = gained(r.d, d);
    return Four(ga, gb, gc, gd, add_quad(old.pa, a, ga), add_quad(old.pb, b, gb), add_quad(old.pc, c, gc),
                add_quad(old.pd, d, gd));
}

fn share_four(own: Four, t: vec4<u32>, thread: u32, lane: u32) {
    squares[thread] = vec4<f32>(own.pa.squares, own.pb.squares, own.pc.squares, own.pd.squares);
    add_max(t.x, own.pa.max_bits, lane);
    add_max(t.y, own.pb.max_bits, lane);
    add_max(t.z, own.pc.max_bits, lane);
    add_max(t.w, own.pd.max_bits, lane);
}

struct Factors4 {
    norm: vec4<f32>,
    to_integer: vec4<f32>,
}

fn factors_four(sums: vec4<f32>, t: vec4<u32>) -> Factors4 {
    let a = factors_of(sums.x, atomicLoad(&max_bits[t.x]));
    let b = factors_of(sums.y, atomicLoad(&max_bits[t.y]));
    let c = factors_of(sums.z, atomicLoad(&max_bits[t.z]));
    let d = factors_of(sums.w, atomicLoad(&max_bits[t.w]));
    return Factors4(vec4<f32>(a.norm, b.norm, c.norm, d.norm),
                    vec4<f32>(a.to_integer, b.to_integer, c.to_integer, d.to_integer));
}

fn store_four(t: vec4<u32>, quad: u32, v: Four, f: Factors4) -> vec4<i32> {
    return vec4<i32>(store_quad(t.x, quad, v.a * f.norm.x, f.to_integer.x),
                     store_quad(t.y, quad, v.b * f.norm.y, f.to_integer.y),
                     store_quad(t.z, quad, v.c * f.norm.z, f.to_integer.z),
                     store_quad(t.w, quad, v.d * f.norm.w, f.to_integer.w));
}

// The same for up to four tokens: what it reads, it keeps, if it is not too much.
fn quantize_four(tokens: u32, thread: u32, lane: u32) -> vec4<f32> {
    let t = min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(tokens - 1u));
    let r0 = raws(t, thread);
    var r1 = Raws();
    if (has_round(1u)) {
        r1 = raws(t, thread + WORKGROUP);
    }
    var r2 = Raws();
    if (has_round(2u)) {
        r2 = raws(t, thread + 2u * WORKGROUP);
    }
    let v0 = add_four(Four(), r0, t, thread);
    var own = v0;
    if (has_round(1u)) {
        own = add_four(own, r1, t, thread + WORKGROUP);
    }
    let v1 = own;
    if (has_round(2u)) {
        own = add_four(own, r2, t, thread + 2u * WORKGROUP);
    }
    let v2 = own;
    for (var quad = thread + 3u * WORKGROUP; quad < K / 4u; quad += WORKGROUP) {
        own = add_four(own, raws(t, quad), t, quad);
    }
    share_four(own, t, thread, lane);
    workgroupBarrier();
    let sums = sum_squares(thread);
    let f = factors_four(sums, t);
    var q_total = store_four(t, thread, v0, f);
    if (has_round(1u)) {
        q_total += store_four(t, thread + WORKGROUP, v1, f);
    }
    if (has_round(2u)) {
        q_total += store_four(t, thread + 2u * WORKGROUP, v2, f);
    }
    for (var quad = thread + 3u * WORKGROUP; quad < 4u * units(); quad += WORKGROUP) {
        q_total += store_four(t, quad, add_four(Four(), raws(t, quad), t, quad), f);
    }
    add_sum(0u, q_total.x, lane);
    if (tokens > 1u) {
        add_sum(1u, q_total.y, lane);
    }
    if (tokens > 2u) {
        add_sum(2u, q_total.z, lane);
    }
    if (tokens > 3u) {
        add_sum(3u, q_total.w, lane);
    }
    return sums;
}

// Sums of up to four tokens, one component a row. By name and not in an array, which drivers keep in memory.
struct Sums {
    t0: vec4<i32>,
    t1: vec4<i32>,
    t2: vec4<i32>,
    t3: vec4<i32>,
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

fn token_dots(c: Codes, token: u32, unit: u32) -> vec4<i32> {
    let at = token * Q_VECTORS + unit;
    if (ACTIVATION == A16) {
        return plane_dots(c, q[at]) * 256 + plane_dots(c, q[at + units()]);
    }
    return plane_dots(c, q[at]);
}

// Adds sixteen columns. Of tokens beyond the last whatever workgroup memory holds: their sums are not written.
fn add_unit(old: Sums, words: vec4<u32>, unit: u32) -> Sums {
    let c = unpack(words);
    var s = old;
    s.t0 += token_dots(c, 0u, unit);
    if (TOKENS > 1u) {
        s.t1 += token_dots(c, 1u, unit);
        s.t2 += token_dots(c, 2u, unit);
        s.t3 += token_dots(c, 3u, unit);
    }
    return s;
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
fn add_pair(old: Sums, words: Words, pair: u32) -> Sums {
    let inside = pair < pairs();
    let own = min(pair, pairs() - 1u);
    let first = select(vec4<u32>(0u), words.first, inside);
    let second = select(vec4<u32>(0u), words.second, inside);
    return add_unit(add_unit(old, first, 2u * own), second, 2u * own + 1u);
}

fn add_loaded(old: Sums, loaded: Ahead, pair: u32, lanes: u32) -> Sums {
    var s = add_pair(old, loaded.a, pair);
    if (batch() > 1u) {
        s = add_pair(s, loaded.b, pair + lanes);
    }
    if (batch() > 2u) {
        s = add_pair(s, loaded.c, pair + 2u * lanes);
    }
    if (batch() > 3u) {
        s = add_pair(s, loaded.d, pair + 3u * lanes);
    }
    return s;
}

// What a row needs beside its sums, which is loaded before them: its scale, its bias, and what is in y.
struct Row {
    scale: f32,
    bias: f32,
    y: vec4<f32>,
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
        own.y.x = y[column];
        if (TOKENS > 1u) {
            let last = arrayLength(&y) - 1u;
            own.y.y = y[min(OUT_STRIDE + column, last)];
            own.y.z = y[min(2u * OUT_STRIDE + column, last)];
            own.y.w = y[min(3u * OUT_STRIDE + column, last)];
        }
    }
    return own;
}

// The sums of all lanes of one token, of the rows from `row` on, to y. A subgroup has at least four lanes.
fn write(token: u32, own: vec4<i32>, row: u32, end: u32, lane: u32, x_scale: f32, rest: Row) {
    let all = subgroupAdd(own) - vec4<i32>(atomicLoad(&q_sum[token]));
    if (lane < 4u && row + lane < end) {
        let sum = select(select(all.x, all.y, lane == 1u), select(all.z, all.w, lane == 3u), lane > 1u);
        var value = f32(sum) * x_scale * rest.scale;
        // Left out, not multiplied by zero: without them the result is products alone, which no compiler
        // may contract, and equals the reference bit for bit.
        if (BIAS == 1u) {
            value += rest.bias;
        }
        if (ACCUMULATE == 1u) {
            value += rest.y[token];
        }
        y[token * OUT_STRIDE + FIRST_ROW + row + lane] = value;
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
    if (thread < TOKENS) {
        atomicStore(&max_bits[thread], 0u);
        atomicStore(&q_sum[thread], 0);
    }
    if (thread == 0u) {
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

    var tokens = 1u;
    var squared = vec4<f32>(0.0);
    if (TOKENS == 1u) {
        squared.x = quantize_one(thread, lane);
    } else {
        tokens = min(TOKENS, step.y);
        squared = quantize_four(tokens, thread, lane);
    }
    workgroupBarrier();
    let x_scale = vec4<f32>(scale_of(0u, squared.x), scale_of(1u, squared.y), scale_of(2u, squared.z),
                            scale_of(3u, squared.w));
    let count = atomicLoad(&subgroups);
    let rounds = (ROWS + 4u * count - 1u) / (4u * count);
    for (var round = 0u; round < rounds; round++) {
        if (round > 0u) {
            row += 4u * count;
            rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), last);
            loaded = load(rows, lane, lanes);
            rest = row_of(row, lane);
        }
        var sums = Sums();
        sums = add_loaded(sums, loaded, lane, lanes);
        for (var start = batch() * lanes; start < pairs(); start += batch() * lanes) {
            sums = add_loaded(sums, load(rows, start + lane, lanes), start + lane, lanes);
        }
        write(0u, sums.t0, row, end, lane, x_scale.x, rest);
        if (TOKENS > 1u && tokens > 1u) {
            write(1u, sums.t1, row, end, lane, x_scale.y, rest);
        }
        if (TOKENS > 1u && tokens > 2u) {
            write(2u, sums.t2, row, end, lane, x_scale.z, rest);
        }
        if (TOKENS > 1u && tokens > 3u) {
            write(3u, sums.t3, row, end, lane, x_scale.w, rest);
        }
    }
}
