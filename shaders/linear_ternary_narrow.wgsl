// linear_ternary_narrow: linear_ternary_tiled.wgsl for CPU renderers, which compile its unrolled loops for seconds and
// gain nothing from them: the formula, the layouts and the exactness are the same, in smaller tiles.
//
//   isum[t, n] = sum over K of code[n, i] * q[t, i], minus sum of q[t]
//   by row    y[t, n] = (f32(isum[t, n]) * x_scale[t]) * scale[n]
//   by group  y[t, n] = (sum over groups of f32(isum[t, n, g]) * scale[n, g]) * x_scale[t]
//   then + bias[n] (BIAS), then + the old y[t, n] (ACCUMULATE)
//
// w        vec4<u32> [N, ceil(K/64)]         read        16 two-bit codes a word
// scales   u32 [SCALE_WORDS]                 read        f32 [N], or f16 [N, GROUPS] two a word
// x        vec4<u32> [T, ceil(K/64), P, 4]   read        int8, four a word; P = 2 in a16: hi plane, lo plane
// x_scale  f32 [T]                           read
// x_sums   i32 [T, ceil(K/64)]               read
// bias     f32 [OUT_N]                       read        BIAS only
// y        f32 [T, OUT_N]                    read_write  this piece writes columns first_row .. first_row + n - 1
//
// A workgroup makes WORKGROUP rows x 8 tokens, a thread one row x 8 tokens; rows are folded over x and y,
// tokens run along z. T is step.tokens, or step.rows with LAST_ROWS. Four blocks of activations a round lie in
// workgroup memory: at most 4.2 KiB. WORKGROUP is at most 256. Needs packed_4x8_integer_dot_product.

const A16: u32 = 2u;
const TOKENS: u32 = 8u;
const BLOCKS: u32 = 4u;

struct Params {
    n: u32,
    blocks: u32,
    groups: u32,
    group_blocks: u32,
    first_row: u32,
    out_stride: u32,
}

override WORKGROUP: u32 = 64;
override ACTIVATION: u32 = 1;
override SCALE_GROUP: u32 = 0;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;
override LAST_ROWS: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x_scale: array<f32>;
@group(0) @binding(6) var<storage, read> x_sums: array<i32>;
@group(0) @binding(7) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<f32>;

// [token, block of the round, plane, quarter of the block]; a8 uses the first half.
var<workgroup> tile: array<vec4<u32>, 256>;
// [block of the round, token]
var<workgroup> tile_sums: array<i32, 32>;

// By integer arithmetic, for a device may flush subnormal halves; infinity and NaN occur in no pack.
fn half(h: u32) -> f32 {
    let magnitude = select(bitcast<f32>(((h & 0x7fffu) << 13u) + 0x38000000u), f32(h & 0x3ffu) * 0x1p-24,
                           (h & 0x7c00u) == 0u);
    return select(magnitude, -magnitude, (h & 0x8000u) != 0u);
}

fn group_scale(row: u32, block: u32) -> f32 {
    let index = row * params.groups + block / params.group_blocks;
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

struct Codes {
    c0: vec4<u32>,
    c1: vec4<u32>,
    c2: vec4<u32>,
    c3: vec4<u32>,
}

struct Sums {
    // Tokens 0..3 and 4..7.
    ia: vec4<i32>,
    ib: vec4<i32>,
    fa: vec4<f32>,
    fb: vec4<f32>,
}

struct Eight {
    a: vec4<i32>,
    b: vec4<i32>,
}

fn planes() -> u32 {
    return select(1u, 2u, ACTIVATION == A16);
}

// vec4s of one token in the tile.
fn token_vectors() -> u32 {
    return BLOCKS * planes() * 4u;
}

fn unpack(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x03030303u);
}

fn dot16(c: vec4<u32>, v: vec4<u32>) -> i32 {
    return dot4I8Packed(c.x, v.x) + dot4I8Packed(c.y, v.y) + dot4I8Packed(c.z, v.z) + dot4I8Packed(c.w, v.w);
}

// One plane of one token's block.
fn dot64(c: Codes, at: u32) -> i32 {
    return dot16(c.c0, tile[at]) + dot16(c.c1, tile[at + 1u]) + dot16(c.c2, tile[at + 2u]) + dot16(c.c3, tile[at + 3u]);
}

fn dot_eight(c: Codes, at: u32) -> Eight {
    let v = token_vectors();
    return Eight(
        vec4<i32>(dot64(c, at), dot64(c, at + v), dot64(c, at + 2u * v), dot64(c, at + 3u * v)),
        vec4<i32>(dot64(c, at + 4u * v), dot64(c, at + 5u * v), dot64(c, at + 6u * v), dot64(c, at + 7u * v)));
}

// Adds block `first + b` of a row, which is block b of the tile.
fn add_block(sums: Sums, words: vec4<u32>, row: u32, first: u32, b: u32) -> Sums {
    let codes = Codes(unpack(words.x), unpack(words.y), unpack(words.z), unpack(words.w));
    // A loop, so that the products stand once in the program: unrolled by hand, CPU drivers took seconds to compile it.
    var dots = Eight(vec4<i32>(0), vec4<i32>(0));
    for (var plane = 0u; plane < planes(); plane++) {
        let more = dot_eight(codes, (b * planes() + plane) * 4u);
        dots = Eight(dots.a * 256 + more.a, dots.b * 256 + more.b);
    }
    let s = b * TOKENS;
    dots.a -= vec4<i32>(tile_sums[s], tile_sums[s + 1u], tile_sums[s + 2u], tile_sums[s + 3u]);
    dots.b -= vec4<i32>(tile_sums[s + 4u], tile_sums[s + 5u], tile_sums[s + 6u], tile_sums[s + 7u]);
    if (SCALE_GROUP == 1u) {
        let scale = group_scale(row, first + b);
        return Sums(sums.ia, sums.ib, sums.fa + vec4<f32>(dots.a) * scale, sums.fb + vec4<f32>(dots.b) * scale);
    }
    return Sums(sums.ia + dots.a, sums.ib + dots.b, sums.fa, sums.fb);
}

// The blocks from `first` on of the tokens from `first_token` on; zero beyond the last of either.
fn load_tile(thread: u32, first: u32, first_token: u32, tokens: u32) {
    let vectors = token_vectors();
    for (var i = thread; i < vectors * TOKENS; i += WORKGROUP) {
        let token = first_token + i / vectors;
        let vector = i % vectors;
        var v = vec4<u32>(0u);
        if (token < tokens && first + vector / (planes() * 4u) < params.blocks) {
            v = x[(token * params.blocks + first) * planes() * 4u + vector];
        }
        tile[i] = v;
    }
    for (var i = thread; i < BLOCKS * TOKENS; i += WORKGROUP) {
        let token = first_token + i % TOKENS;
        let block = first + i / TOKENS;
        var sum = 0;
        if (token < tokens && block < params.blocks) {
            sum = x_sums[token * params.blocks + block];
        }
        tile_sums[i] = sum;
    }
}

fn write(token: u32, tokens: u32, row: u32, isum: i32, fsum: f32) {
    if (token >= tokens || row >= params.n) {
        return;
    }
    var value: f32;
    if (SCALE_GROUP == 1u) {
        value = fsum * x_scale[token];
    } else {
        value = f32(isum) * x_scale[token] * bitcast<f32>(scales[row]);
    }
    let column = params.first_row + row;
    let at = token * params.out_stride + column;
    // Left out, not multiplied by zero: without them the result is products alone, which no compiler
    // may contract, and equals the reference bit for bit.
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
    let last_block = params.blocks - 1u;
    let base = read_row * params.blocks;

    var sums = Sums(vec4<i32>(0), vec4<i32>(0), vec4<f32>(0.0), vec4<f32>(0.0));
    var words = w[base];
    for (var first = 0u; first < params.blocks; first += BLOCKS) {
        workgroupBarrier();
        load_tile(thread, first, first_token, tokens);
        workgroupBarrier();
        for (var b = 0u; b < min(BLOCKS, params.blocks - first); b++) {
            // The next weights are on their way while these are used.
            let next = w[base + min(first + b + 1u, last_block)];
            sums = add_block(sums, words, read_row, first, b);
            words = next;
        }
    }

    write(first_token, tokens, row, sums.ia.x, sums.fa.x);
    write(first_token + 1u, tokens, row, sums.ia.y, sums.fa.y);
    write(first_token + 2u, tokens, row, sums.ia.z, sums.fa.z);
    write(first_token + 3u, tokens, row, sums.ia.w, sums.fa.w);
    write(first_token + 4u, tokens, row, sums.ib.x, sums.fb.x);
    write(first_token + 5u, tokens, row, sums.ib.y, sums.fb.y);
    write(first_token + 6u, tokens, row, sums.ib.z, sums.fb.z);
    write(first_token + 7u, tokens, row, sums.ib.w, sums.fb.w);
}
