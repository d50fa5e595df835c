// linear_float: weights in any encoding x one token of f32 activations.
//
//   y[n] = sum over K of value(w[n, i]) * x[i], then + bias[n] (BIAS), then + the old y[n] (ACCUMULATE)
//
// w       u32 [N, ROW_WORDS]    read        codes or floats, in any encoding (shaders/README.md)
// scales  u32 [SCALE_WORDS]     read        ternary by row: f32 [N]; by group: 1, 2 or 4 bytes [N, GROUPS]
// x       f32 [1, K]            read
// bias    f32 [OUT_N]           read        BIAS only
// y       f32 [1, OUT_N]        read_write  this piece writes first_row .. first_row + n - 1
//
// Four rows a workgroup, folded over x and y; a thread takes every WORKGROUP-th run of eight columns of all
// four, which lies in one scale group. WORKGROUP is a multiple of 16, at most 256.

const TERNARY: u32 = 0u;
const Q8: u32 = 1u;
const Q4: u32 = 2u;
const F16: u32 = 3u;
const Q4A: u32 = 5u;
const NVFP4: u32 = 6u;
const MXFP4: u32 = 7u;

struct Params {
    n: u32,
    k: u32,
    row_words: u32,
    groups: u32,
    group: u32,
    first_row: u32,
    out_stride: u32,
}

override WORKGROUP: u32 = 64;
override ENCODING: u32 = 0;
override SCALE_GROUP: u32 = 0;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<f32>;
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

// Elements 4*quad .. 4*quad+3 of a row, times `scale_of`.
fn four(row: u32, quad: u32) -> vec4<f32> {
    let base = row * params.row_words;
    if (ENCODING == TERNARY) {
        let codes = (w[base + (quad >> 2u)] >> (2u * (quad & 3u))) & 0x03030303u;
        return vec4<f32>(vec4<u32>(codes, codes >> 8u, codes >> 16u, codes >> 24u) & vec4<u32>(3u)) - 1.0;
    } else if (ENCODING == Q8) {
        return signed_bytes(w[base + quad]);
    } else if (ENCODING == Q4) {
        let nibbles = w[base + (quad >> 1u)] >> (16u * (quad & 1u));
        return vec4<f32>(vec4<u32>(nibbles, nibbles >> 4u, nibbles >> 8u, nibbles >> 12u) & vec4<u32>(15u)) - 8.0;
    } else if (ENCODING == Q4A || ENCODING == NVFP4 || ENCODING == MXFP4) {
        let nibbles = w[base + (quad >> 1u)] >> (16u * (quad & 1u));
        return four_bits(nibbles, factors_of(row * params.groups + (quad * 4u) / params.group), 0u);
    } else if (ENCODING == F16) {
        let low = w[base + 2u * quad];
        let high = w[base + 2u * quad + 1u];
        return vec4<f32>(half(low), half(low >> 16u), half(high), half(high >> 16u));
    }
    let at = base + 4u * quad;
    return vec4<f32>(bitcast<f32>(w[at]), bitcast<f32>(w[at + 1u]), bitcast<f32>(w[at + 2u]), bitcast<f32>(w[at + 3u]));
}

fn scale_of(row: u32, quad: u32) -> f32 {
    if (ENCODING == NVFP4) {
        return bitcast<f32>(scales[0]);
    }
    if (ENCODING >= F16) {
        return 1.0;
    }
    if (ENCODING == TERNARY && SCALE_GROUP == 0u) {
        return bitcast<f32>(scales[row]);
    }
    let index = row * params.groups + (quad * 4u) / params.group;
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

// Zero beyond K.
fn four_of_x(quad: u32) -> vec4<f32> {
    let i = vec4<u32>(quad * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
    let inside = min(i, vec4<u32>(params.k - 1u));
    return select(vec4<f32>(0.0), vec4<f32>(x[inside.x], x[inside.y], x[inside.z], x[inside.w]),
                  i < vec4<u32>(params.k));
}

fn dot_pair(row: u32, quad: u32, second: u32, x0: vec4<f32>, x1: vec4<f32>) -> f32 {
    return (dot(four(row, quad), x0) + dot(four(row, second), x1)) * scale_of(row, quad);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = (workgroup.x + workgroup.y * workgroups.x) * 4u;
    if (row >= params.n) {
        return;
    }
    // Rows beyond the last repeat it and are not written.
    let rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(params.n - 1u));
    let quads = (params.k + 3u) / 4u;

    var sums = vec4<f32>(0.0);
    for (var quad = thread * 2u; quad < quads; quad += WORKGROUP * 2u) {
        // Where the run has four columns only, they come twice, the second time times zero.
        let second = min(quad + 1u, quads - 1u);
        let x0 = four_of_x(quad);
        let x1 = select(vec4<f32>(0.0), four_of_x(second), second > quad);
        sums += vec4<f32>(dot_pair(rows.x, quad, second, x0, x1), dot_pair(rows.y, quad, second, x0, x1),
                          dot_pair(rows.z, quad, second, x0, x1), dot_pair(rows.w, quad, second, x0, x1));
    }

    partial[thread] = sums;
    workgroupBarrier();
    if (thread < 16u) {
        var total = partial[thread];
        for (var i = thread + 16u; i < WORKGROUP; i += 16u) {
            total += partial[i];
        }
        partial[thread] = total;
    }
    workgroupBarrier();
    if (thread < 4u && row + thread < params.n) {
        var total = partial[0];
        for (var i = 1u; i < 16u; i++) {
            total += partial[i];
        }
        let column = params.first_row + row + thread;
        var value = total[thread];
        if (BIAS == 1u) {
            value += bias[column];
        }
        if (ACCUMULATE == 1u) {
            value += y[column];
        }
        y[column] = value;
    }
}
