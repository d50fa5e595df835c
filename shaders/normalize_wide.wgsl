// norm_wide, quantize_wide, glu_wide: as normalize.wgsl, bit for bit, for integer activations of rows that fit a thread's
// registers: every column is loaded once, and all of a thread's at once.
//
//   v[i] = x[t, i], or act(x[t, 0, i]) * x[t, 1, i] with ACT (formulas of normalize.wgsl)
//   a[i] = v[i] * gain[i] / sqrt(mean(v^2) + eps) with NORM, else v[i]
//   q, q_scale, q_sums = integers of a, as in normalize.wgsl
//
// x        vec4<f32> [X_T, K/4] or [X_T, 2, K/4] read  LAST_ROWS: its last R rows are taken
// gain     vec4<f32> [K/4]                  read   GAIN only
// q        u32 [T, ceil(K/64), P, 16]       write  four int8 a word, zero beyond K; P = 2 in a16: hi, lo
// q_scale  f32 [T]                          write
// q_sums   i32 [T, ceil(K/64)]              write
//
// One workgroup a row. K is a multiple of 4, at most 32 * WORKGROUP. WORKGROUP is a multiple of 16, at most 256.

const SILU: u32 = 1u;
const RELU2: u32 = 2u;
const A16: u32 = 2u;
const ABSMAX_FLOOR: f32 = 1e-5;
const INFINITY_BITS: u32 = 0x7f800000u;

override WORKGROUP: u32 = 256;
override K: u32 = 4;
override EPS: f32 = 0.0;
override ACT: u32 = 0;
override NORM: u32 = 1;
override GAIN: u32 = 1;
override ACTIVATION: u32 = 1;
override LAST_ROWS: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> gain: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> q: array<u32>;
@group(0) @binding(5) var<storage, read_write> q_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> q_sums: array<i32>;

var<workgroup> squares: array<f32, WORKGROUP>;
var<workgroup> maxima: array<u32, WORKGROUP>;
// Of blocks of 64 columns.
var<workgroup> block_sums: array<atomic<i32>, 128>;

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

// What is loaded for four columns: x, or gate and up; and their gain.
struct Raw {
    a: vec4<f32>,
    b: vec4<f32>,
    gain: vec4<f32>,
}

// Of the last columns for those beyond.
fn raw(row: u32, quad: u32) -> Raw {
    let quads = K / 4u;
    let own = min(quad, quads - 1u);
    var r = Raw();
    if (ACT != 0u) {
        r.a = x[2u * row * quads + own];
        r.b = x[(2u * row + 1u) * quads + own];
    } else {
        r.a = x[row * quads + own];
    }
    if (GAIN == 1u) {
        r.gain = gain[own];
    }
    return r;
}

// v of four columns; zero beyond the last.
fn value_of(r: Raw, quad: u32) -> vec4<f32> {
    var v = r.a;
    if (ACT != 0u) {
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

// Bits of the largest |v|, where NaN is above infinity.
fn largest(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// The columns of a round after their gain; sum of squares and bits of the largest so far.
struct Kept {
    v: vec4<f32>,
    squares: f32,
    max_bits: u32,
}

fn keep(before: Kept, r: Raw, quad: u32) -> Kept {
    let v = value_of(r, quad);
    let after = gained(r, v);
    return Kept(after, before.squares + dot(v, v), max(before.max_bits, largest(after)));
}

fn blocks() -> u32 {
    return (K + 63u) / 64u;
}

// Whether a round of the threads has columns.
fn has_round(round: u32) -> bool {
    return 16u * blocks() > round * WORKGROUP;
}

fn integer_limit() -> f32 {
    return select(127.0, 32639.0, ACTIVATION == A16);
}

fn pack_bytes(v: vec4<i32>) -> u32 {
    let b = bitcast<vec4<u32>>(v) & vec4<u32>(255u);
    return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}

// Four integers of a row, and their share of the sum of their block.
fn store(row: u32, quad: u32, v: vec4<f32>, to_integer: f32) {
    let block = quad >> 4u;
    if (block >= blocks()) {
        return;
    }
    let lowest = select(-128.0, -32639.0, ACTIVATION == A16);
    let n = vec4<i32>(clamp(round(v * to_integer), vec4<f32>(lowest), vec4<f32>(integer_limit())));
    let at = row * blocks() + block;
    if (ACTIVATION == A16) {
        let low = ((n + 128) & vec4<i32>(255)) - 128;
        q[at * 32u + (quad & 15u)] = pack_bytes((n - low) >> vec4<u32>(8u));
        q[at * 32u + 16u + (quad & 15u)] = pack_bytes(low);
    } else {
        q[at * 16u + (quad & 15u)] = pack_bytes(n);
    }
    atomicAdd(&block_sums[block], n.x + n.y + n.z + n.w);
}

struct Totals {
    squares: f32,
    max_bits: u32,
}

// Every thread gets the totals, in the order of normalize.wgsl.
fn reduce(thread: u32, sum: f32, max_bits: u32) -> Totals {
    squares[thread] = sum;
    maxima[thread] = max_bits;
    workgroupBarrier();
    if (thread < 16u) {
        var s = 0.0;
        var m = 0u;
        for (var i = thread; i < WORKGROUP; i += 16u) {
            s += squares[i];
            m = max(m, maxima[i]);
        }
        squares[thread] = s;
        maxima[thread] = m;
    }
    workgroupBarrier();
    var totals = Totals(0.0, 0u);
    for (var i = 0u; i < 16u; i++) {
        totals.squares += squares[i];
        totals.max_bits = max(totals.max_bits, maxima[i]);
    }
    return totals;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let out_row = workgroup.x + workgroup.y * workgroups.x;
    var row = out_row;
    if (LAST_ROWS == 1u) {
        row += step.y - step.z;
    }
    for (var i = thread; i < blocks(); i += WORKGROUP) {
        atomicStore(&block_sums[i], 0);
    }
    let r0 = raw(row, thread);
    var r1 = Raw();
    if (has_round(1u)) {
        r1 = raw(row, thread + 1u * WORKGROUP);
    }
    var r2 = Raw();
    if (has_round(2u)) {
        r2 = raw(row, thread + 2u * WORKGROUP);
    }
    var r3 = Raw();
    if (has_round(3u)) {
        r3 = raw(row, thread + 3u * WORKGROUP);
    }
    var r4 = Raw();
    if (has_round(4u)) {
        r4 = raw(row, thread + 4u * WORKGROUP);
    }
    var r5 = Raw();
    if (has_round(5u)) {
        r5 = raw(row, thread + 5u * WORKGROUP);
    }
    var r6 = Raw();
    if (has_round(6u)) {
        r6 = raw(row, thread + 6u * WORKGROUP);
    }
    var r7 = Raw();
    if (has_round(7u)) {
        r7 = raw(row, thread + 7u * WORKGROUP);
    }
    let k0 = keep(Kept(), r0, thread);
    var last = k0;
    var k1 = Kept();
    if (has_round(1u)) {
        k1 = keep(last, r1, thread + 1u * WORKGROUP);
        last = k1;
    }
    var k2 = Kept();
    if (has_round(2u)) {
        k2 = keep(last, r2, thread + 2u * WORKGROUP);
        last = k2;
    }
    var k3 = Kept();
    if (has_round(3u)) {
        k3 = keep(last, r3, thread + 3u * WORKGROUP);
        last = k3;
    }
    var k4 = Kept();
    if (has_round(4u)) {
        k4 = keep(last, r4, thread + 4u * WORKGROUP);
        last = k4;
    }
    var k5 = Kept();
    if (has_round(5u)) {
        k5 = keep(last, r5, thread + 5u * WORKGROUP);
        last = k5;
    }
    var k6 = Kept();
    if (has_round(6u)) {
        k6 = keep(last, r6, thread + 6u * WORKGROUP);
        last = k6;
    }
    var k7 = Kept();
    if (has_round(7u)) {
        k7 = keep(last, r7, thread + 7u * WORKGROUP);
        last = k7;
    }
    let totals = reduce(thread, last.squares, last.max_bits);
    let factor = select(1.0, inverseSqrt(totals.squares / f32(K) + EPS), NORM == 1u);
    let absmax = max(bitcast<f32>(totals.max_bits) * factor, ABSMAX_FLOOR);
    let to_integer = integer_limit() / absmax;
    if (thread == 0u) {
        q_scale[out_row] = select(absmax / integer_limit(), bitcast<f32>(totals.max_bits),
                                  totals.max_bits >= INFINITY_BITS);
    }
    store(out_row, thread, k0.v * factor, to_integer);
    if (has_round(1u)) {
        store(out_row, thread + 1u * WORKGROUP, k1.v * factor, to_integer);
    }
    if (has_round(2u)) {
        store(out_row, thread + 2u * WORKGROUP, k2.v * factor, to_integer);
    }
    if (has_round(3u)) {
        store(out_row, thread + 3u * WORKGROUP, k3.v * factor, to_integer);
    }
    if (has_round(4u)) {
        store(out_row, thread + 4u * WORKGROUP, k4.v * factor, to_integer);
    }
    if (has_round(5u)) {
        store(out_row, thread + 5u * WORKGROUP, k5.v * factor, to_integer);
    }
    if (has_round(6u)) {
        store(out_row, thread + 6u * WORKGROUP, k6.v * factor, to_integer);
    }
    if (has_round(7u)) {
        store(out_row, thread + 7u * WORKGROUP, k7.v * factor, to_integer);
    }
    workgroupBarrier();
    for (var i = thread; i < blocks(); i += WORKGROUP) {
        q_sums[out_row * blocks() + i] = atomicLoad(&block_sums[i]);
    }
}
