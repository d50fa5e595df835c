// linear_float_tiled: weights in any encoding x several tokens of f32 activations. The formula and the layouts
// are those of linear_float; each weight is decoded once for eight tokens.
//
//   y[t, n] = sum over K of value(w[n, i]) * x[t, i], then + bias[n] (BIAS), then + the old y[t, n] (ACCUMULATE)
//
// w       u32 [N, ROW_WORDS]    read        codes or floats, in any encoding (shaders/README.md)
// scales  u32 [SCALE_WORDS]     read        ternary by row: f32 [N]; by group: 1, 2 or 4 bytes [N, GROUPS]
// x       f32 [T, K]            read
// bias    f32 [OUT_N]           read        BIAS only
// y       f32 [T, OUT_N]        read_write  this piece writes columns first_row .. first_row + n - 1
//
// A workgroup makes WORKGROUP rows x 8 tokens, a thread one row x 8 tokens; rows are folded over x and y,
// tokens run along z. T is step.tokens, or step.rows with LAST_ROWS. 128 columns of activations a round lie in
// workgroup memory: 4 KiB. WORKGROUP is at most 256.

const TERNARY: u32 = 0u;
const Q8: u32 = 1u;
const Q4: u32 = 2u;
const F16: u32 = 3u;
const Q4A: u32 = 5u;
const NVFP4: u32 = 6u;
const MXFP4: u32 = 7u;
const TOKENS: u32 = 8u;
// Runs of four columns a round. A multiple of 8, so that the quads of a scale group stay together.
const QUADS: u32 = 32u;

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
override LAST_ROWS: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<f32>;
@group(0) @binding(5) var<storage, read> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> y: array<f32>;

// [token, quad of the round]
var<workgroup> tile: array<vec4<f32>, 256>;

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

// Four activations of a token; zero beyond K and beyond the last token.
fn four_of_x(token: u32, tokens: u32, quad: u32) -> vec4<f32> {
    if (token >= tokens) {
        return vec4<f32>(0.0);
    }
    let i = vec4<u32>(quad * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
    let at = vec4<u32>(token * params.k) + min(i, vec4<u32>(params.k - 1u));
    return select(vec4<f32>(0.0), vec4<f32>(x[at.x], x[at.y], x[at.z], x[at.w]), i < vec4<u32>(params.k));
}

fn write(token: u32, tokens: u32, row: u32, sum: f32) {
    if (token >= tokens || row >= params.n) {
        return;
    }
    let column = params.first_row + row;
    let at = token * params.out_stride + column;
    var value = sum;
    if (BIAS == 1u) {
        value += bias[column];
    }
    if (ACCUMULATE == 1u) {
        value += y[at];
    }
    y[at] = value;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + thread;
    let tokens = select(step.y, step.z, LAST_ROWS == 1u);
    let first_token = workgroup.z * TOKENS;
    // Threads beyond the last row read it, for they help to load the tile, and write nothing.
    let read_row = min(row, params.n - 1u);
    let quads = (params.k + 3u) / 4u;

    var low = vec4<f32>(0.0);
    var high = vec4<f32>(0.0);
    for (var first = 0u; first < quads; first += QUADS) {
        workgroupBarrier();
        for (var i = thread; i < QUADS * TOKENS; i += WORKGROUP) {
            tile[i] = four_of_x(first_token + i / QUADS, tokens, first + i % QUADS);
        }
        workgroupBarrier();
        let round_quads = min(QUADS, quads - first);
        for (var j = 0u; j < round_quads; j++) {
            let v = four(read_row, first + j) * scale_of(read_row, first + j);
            low += vec4<f32>(dot(v, tile[j]), dot(v, tile[QUADS + j]),
                             dot(v, tile[2u * QUADS + j]), dot(v, tile[3u * QUADS + j]));
            high += vec4<f32>(dot(v, tile[4u * QUADS + j]), dot(v, tile[5u * QUADS + j]),
                              dot(v, tile[6u * QUADS + j]), dot(v, tile[7u * QUADS + j]));
        }
    }

    write(first_token, tokens, row, low.x);
    write(first_token + 1u, tokens, row, low.y);
    write(first_token + 2u, tokens, row, low.z);
    write(first_token + 3u, tokens, row, low.w);
    write(first_token + 4u, tokens, row, high.x);
    write(first_token + 5u, tokens, row, high.y);
    write(first_token + 6u, tokens, row, high.z);
    write(first_token + 7u, tokens, row, high.w);
}
