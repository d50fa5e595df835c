// linear_float_wide: weights in whole vec4s of words x up to eight tokens of f32 activations.
//
//   y[t, n] = sum over K of value(w[n, i]) * x[t, i], then + bias[n] (BIAS), then + the old y[t, n] (ACCUMULATE)
//
// w       vec4<u32> [N, ROW_WORDS/4]   read        codes or floats, in any encoding but f16 (shaders/README.md)
// scales  u32 [SCALE_WORDS]            read        ternary by row: f32 [N]; by group: 1, 2 or 4 bytes [N, GROUPS]
// x       vec4<f32> [T, K/4]           read
// bias    f32 [OUT_N]                  read        BIAS only
// y       f32 [T, OUT_N]               read_write  this piece writes columns first_row .. first_row + n - 1
//
// WORKGROUP / 4 rows a workgroup, folded over x and y: sixteen lanes share four rows, a thread takes every 16th vec4 of
// each, so that a workgroup reads whole lines of memory, with four loads in flight. K is a multiple of 4. T is
// step.tokens, or step.rows with LAST_ROWS, at most TOKENS, at most 8. The sums of a token never depend on TOKENS.
// WORKGROUP is a multiple of 16, at most 256.

const TERNARY: u32 = 0u;
const Q8: u32 = 1u;
const Q4: u32 = 2u;
const Q4A: u32 = 5u;
const NVFP4: u32 = 6u;
const MXFP4: u32 = 7u;
const LANES: u32 = 16u;

override WORKGROUP: u32 = 128;
override TOKENS: u32 = 1;
override ENCODING: u32 = 1;
override SCALE_GROUP: u32 = 0;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;
override LAST_ROWS: u32 = 0;
override N: u32 = 1;
override K: u32 = 4;
override VECTORS: u32 = 1;
override GROUPS: u32 = 1;
override GROUP: u32 = 32;
override FIRST_ROW: u32 = 0;
override OUT_STRIDE: u32 = 1;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

// One component a row.
var<workgroup> partial: array<vec4<f32>, WORKGROUP>;

// By integer arithmetic, for a device may flush subnormal halves; infinity and NaN occur in no pack.
fn half(h: u32) -> f32 {
    let magnitude = select(bitcast<f32>(((h & 0x7fffu) << 13u) + 0x38000000u), f32(h & 0x3ffu) * 0x1p-24,
                           (h & 0x7c00u) == 0u);
    return select(magnitude, -magnitude, (h & 0x8000u) != 0u);
}

fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(word << 24u), bitcast<i32>(word << 16u),
                               bitcast<i32>(word << 8u), bitcast<i32>(word)) >> vec4<u32>(24u));
}

// E2M1 times 2: its magnitudes 0, 1, 2, 3, 4, 6, 8, 12 are the nibbles of a word.
fn doubled(codes: vec4<u32>) -> vec4<f32> {
    let magnitude = vec4<f32>((vec4<u32>(0xc8643210u) >> ((codes & vec4<u32>(7u)) * 4u)) & vec4<u32>(15u));
    return select(magnitude, -magnitude, codes > vec4<u32>(7u));
}

// E4M3 without its sign, by integer arithmetic as `half`.
fn e4m3(code: u32) -> f32 {
    return select(bitcast<f32>((code << 20u) + 0x3c000000u), f32(code) * 0x1p-9, code < 8u);
}

fn scale_byte(index: u32) -> u32 {
    return (scales[index >> 2u] >> (8u * (index & 3u))) & 255u;
}

// What the nibbles of a group are multiplied by: q4a scale and minimum, nvfp4 this group's scale and the next one's,
// mxfp4 a power of two in two factors, for one alone may be too small for f32. Halves, since E2M1 comes doubled.
fn factors_of(group: u32) -> vec2<f32> {
    if (ENCODING == Q4A) {
        return vec2<f32>(half(scales[group]), half(scales[group] >> 16u));
    } else if (ENCODING == NVFP4) {
        return vec2<f32>(e4m3(scale_byte(group + 4u)), e4m3(scale_byte(group + 5u))) * 0.5;
    }
    let code = scale_byte(group);
    return bitcast<vec2<f32>>((vec2<u32>(code / 2u, code - code / 2u) + 63u) << vec2<u32>(23u));
}

// Values of four nibbles, quad `i` of those that the factors are for; nvfp4 without the tensor's scale.
fn four_bits(nibbles: u32, factors: vec2<f32>, i: u32) -> vec4<f32> {
    let codes = vec4<u32>(nibbles, nibbles >> 4u, nibbles >> 8u, nibbles >> 12u) & vec4<u32>(15u);
    if (ENCODING == Q4A) {
        return vec4<f32>(codes) * factors.x + factors.y;
    } else if (ENCODING == NVFP4) {
        return doubled(codes) * select(factors.x, factors.y, i >= 4u);
    }
    return doubled(codes) * factors.x * factors.y;
}

// Quads of columns in a vec4 of words.
fn vector_quads() -> u32 {
    let nibbles = ENCODING == Q4 || ENCODING >= Q4A;
    return select(select(select(1u, 8u, nibbles), 4u, ENCODING == Q8), 16u, ENCODING == TERNARY);
}

// Quad `i` of a vec4 of words, times `scale_of`.
fn quad_of(v: vec4<u32>, i: u32, factors: vec2<f32>) -> vec4<f32> {
    if (ENCODING == TERNARY) {
        let codes = (v[i >> 2u] >> (2u * (i & 3u))) & 0x03030303u;
        return vec4<f32>(vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(3u)) - 1.0;
    } else if (ENCODING == Q8) {
        return signed_bytes(v[i]);
    } else if (ENCODING == Q4) {
        let nibbles = v[i >> 1u] >> (16u * (i & 1u));
        return vec4<f32>(vec4<u32>(nibbles, nibbles >> 4u, nibbles >> 8u, nibbles >> 12u) & vec4<u32>(15u)) - 8.0;
    } else if (ENCODING >= Q4A) {
        return four_bits(v[i >> 1u] >> (16u * (i & 1u)), factors, i);
    }
    return bitcast<vec4<f32>>(v);
}

// A vec4 lies in one scale group, multiples of 32 columns or of 64 in ternary, or in two groups of nvfp4.
fn scale_of(row: u32, quad: u32) -> f32 {
    if (ENCODING == NVFP4) {
        return bitcast<f32>(scales[0]);
    }
    if (ENCODING > Q4) {
        return 1.0;
    }
    if (ENCODING == TERNARY && SCALE_GROUP == 0u) {
        return bitcast<f32>(scales[row]);
    }
    let index = row * GROUPS + (quad * 4u) / max(GROUP, 1u);
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

// Four columns of four rows.
struct Quads {
    r0: vec4<f32>,
    r1: vec4<f32>,
    r2: vec4<f32>,
    r3: vec4<f32>,
}

// Sums of up to eight tokens, one component a row. By name and not in an array, which drivers keep in memory.
struct Sums {
    t0: vec4<f32>,
    t1: vec4<f32>,
    t2: vec4<f32>,
    t3: vec4<f32>,
    t4: vec4<f32>,
    t5: vec4<f32>,
    t6: vec4<f32>,
    t7: vec4<f32>,
}

// T; one token needs no look at the step.
fn token_count() -> u32 {
    if (TOKENS == 1u) {
        return 1u;
    }
    return min(TOKENS, select(step.y, step.z, LAST_ROWS == 1u));
}

// Tokens beyond the last read the last: a branch would cost more. Codes beyond the columns are times zero.
fn dots(w: Quads, token: u32, quad: u32) -> vec4<f32> {
    let quads = K / 4u;
    let own = x[min(token, token_count() - 1u) * quads + min(quad, quads - 1u)];
    let v = select(vec4<f32>(0.0), own, quad < quads);
    return vec4<f32>(dot(w.r0, v), dot(w.r1, v), dot(w.r2, v), dot(w.r3, v));
}

fn add_quad(old: Sums, w: Quads, quad: u32) -> Sums {
    var s = old;
    s.t0 += dots(w, 0u, quad);
    if (TOKENS > 1u) {
        s.t1 += dots(w, 1u, quad);
        s.t2 += dots(w, 2u, quad);
        s.t3 += dots(w, 3u, quad);
    }
    if (TOKENS > 4u) {
        s.t4 += dots(w, 4u, quad);
        s.t5 += dots(w, 5u, quad);
        s.t6 += dots(w, 6u, quad);
        s.t7 += dots(w, 7u, quad);
    }
    return s;
}

fn add_scaled(old: Sums, more: Sums, scale: vec4<f32>) -> Sums {
    var s = old;
    s.t0 = fma(more.t0, scale, s.t0);
    if (TOKENS > 1u) {
        s.t1 = fma(more.t1, scale, s.t1);
        s.t2 = fma(more.t2, scale, s.t2);
        s.t3 = fma(more.t3, scale, s.t3);
    }
    if (TOKENS > 4u) {
        s.t4 = fma(more.t4, scale, s.t4);
        s.t5 = fma(more.t5, scale, s.t5);
        s.t6 = fma(more.t6, scale, s.t6);
        s.t7 = fma(more.t7, scale, s.t7);
    }
    return s;
}

// Adds the lanes of a token and writes its rows.
fn finish(token: u32, sums: vec4<f32>, first: u32, thread: u32) {
    partial[thread] = sums;
    workgroupBarrier();
    if (thread < WORKGROUP / 4u && first + thread < N) {
        let start = (thread / 4u) * LANES;
        var total = partial[start];
        for (var i = 1u; i < LANES; i++) {
            total += partial[start + i];
        }
        let column = FIRST_ROW + first + thread;
        let at = token * OUT_STRIDE + column;
        var value = total[thread & 3u];
        if (BIAS == 1u) {
            value += bias[column];
        }
        if (ACCUMULATE == 1u) {
            value += y[at];
        }
        y[at] = value;
    }
    workgroupBarrier();
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let first = (workgroup.x + workgroup.y * workgroups.x) * (WORKGROUP / 4u);
    if (first >= N) {
        return;
    }
    let lane = thread % LANES;
    // Rows beyond the last repeat it and are not written.
    let row = first + (thread / LANES) * 4u;
    let rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
    let base = rows * VECTORS;

    var sums = Sums();
    for (var i = lane; i < VECTORS; i += LANES) {
        let w0 = w[base.x + i];
        let w1 = w[base.y + i];
        let w2 = w[base.z + i];
        let w3 = w[base.w + i];
        let quad = i * vector_quads();
        let scale = vec4<f32>(scale_of(rows.x, quad), scale_of(rows.y, quad),
                              scale_of(rows.z, quad), scale_of(rows.w, quad));
        // A second group of nvfp4 that the row does not have is times zero, and its bytes are never NaN.
        var f0 = vec2<f32>(0.0);
        var f1 = vec2<f32>(0.0);
        var f2 = vec2<f32>(0.0);
        var f3 = vec2<f32>(0.0);
        if (ENCODING >= Q4A) {
            let groups = rows * GROUPS + (quad * 4u) / max(GROUP, 1u);
            f0 = factors_of(groups.x);
            f1 = factors_of(groups.y);
            f2 = factors_of(groups.z);
            f3 = factors_of(groups.w);
        }
        var own = Sums();
        for (var j = 0u; j < vector_quads(); j++) {
            let four_rows = Quads(quad_of(w0, j, f0), quad_of(w1, j, f1), quad_of(w2, j, f2), quad_of(w3, j, f3));
            own = add_quad(own, four_rows, quad + j);
        }
        sums = add_scaled(sums, own, scale);
    }

    let tokens = token_count();
    finish(0u, sums.t0, first, thread);
    if (tokens > 1u) {
        finish(1u, sums.t1, first, thread);
    }
    if (tokens > 2u) {
        finish(2u, sums.t2, first, thread);
    }
    if (tokens > 3u) {
        finish(3u, sums.t3, first, thread);
    }
    if (tokens > 4u) {
        finish(4u, sums.t4, first, thread);
    }
    if (tokens > 5u) {
        finish(5u, sums.t5, first, thread);
    }
    if (tokens > 6u) {
        finish(6u, sums.t6, first, thread);
    }
    if (tokens > 7u) {
        finish(7u, sums.t7, first, thread);
    }
}
