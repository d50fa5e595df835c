// linear_ternary_tiled: ternary matrix x many tokens of integer activations. The formula, the layouts and the
// exactness are those of linear_ternary.wgsl; each weight word is unpacked once for eight tokens.
//
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
// One workgroup of 128 threads makes 64 rows x 64 tokens, a thread four rows (every 16th) x eight tokens (every 8th); rows
// are folded over x and y, tokens run along z. T is step.tokens, or step.rows with LAST_ROWS. Each round of two blocks
// (one in a16) of 64 columns lies in workgroup memory, 11.5 KiB; the next one is fetched meanwhile.
// WORKGROUP is 128. Needs packed_4x8_integer_dot_product.

const A16: u32 = 2u;
const ROWS: u32 = 64u;
const TOKENS: u32 = 64u;
// vec4s of activations of a token in a round, and their stride, one more so that tokens lie in different banks.
const VECTORS: u32 = 8u;
const STRIDE: u32 = 9u;

struct Params {
    n: u32,
    blocks: u32,
    groups: u32,
    group_blocks: u32,
    first_row: u32,
    out_stride: u32,
}

override WORKGROUP: u32 = 128;
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

// [token, STRIDE]
var<workgroup> tile: array<vec4<u32>, 576>;
// [block of the round, row]
var<workgroup> codes: array<vec4<u32>, 128>;
// [block of the round, token]; at the end, by row, the sums over all blocks
var<workgroup> tile_sums: array<i32, 128>;

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

// Sums of the thread's eight tokens, one component a row. By name and not in an array, which drivers keep in memory.
struct Sums {
    t0: vec4<i32>,
    t1: vec4<i32>,
    t2: vec4<i32>,
    t3: vec4<i32>,
    t4: vec4<i32>,
    t5: vec4<i32>,
    t6: vec4<i32>,
    t7: vec4<i32>,
}

struct FloatSums {
    t0: vec4<f32>,
    t1: vec4<f32>,
    t2: vec4<f32>,
    t3: vec4<f32>,
    t4: vec4<f32>,
    t5: vec4<f32>,
    t6: vec4<f32>,
    t7: vec4<f32>,
}

fn token_dots(c: Codes, at: u32, low_at: u32) -> vec4<i32> {
    if (ACTIVATION == A16) {
        return dots(c, tile[at]) * 256 + dots(c, tile[low_at]);
    }
    return dots(c, tile[at]);
}

// Adds sixteen columns. `at` is the vec4 of the thread's first token; rounds: its tokens that there are.
fn add_word(sums: Sums, c: Codes, at: u32, rounds: u32) -> Sums {
    const NEXT: u32 = 8u * STRIDE;
    let low = at + 4u;
    var s = sums;
    s.t0 += token_dots(c, at, low);
    if (rounds > 1u) {
        s.t1 += token_dots(c, at + NEXT, low + NEXT);
    }
    if (rounds > 2u) {
        s.t2 += token_dots(c, at + 2u * NEXT, low + 2u * NEXT);
        s.t3 += token_dots(c, at + 3u * NEXT, low + 3u * NEXT);
    }
    if (rounds > 4u) {
        s.t4 += token_dots(c, at + 4u * NEXT, low + 4u * NEXT);
        s.t5 += token_dots(c, at + 5u * NEXT, low + 5u * NEXT);
        s.t6 += token_dots(c, at + 6u * NEXT, low + 6u * NEXT);
        s.t7 += token_dots(c, at + 7u * NEXT, low + 7u * NEXT);
    }
    return s;
}

// Block `b` of the round.
fn add_block(sums: Sums, b: u32, row_lane: u32, token_lane: u32, rounds: u32) -> Sums {
    let w0 = codes[b * ROWS + row_lane];
    let w1 = codes[b * ROWS + row_lane + 16u];
    let w2 = codes[b * ROWS + row_lane + 32u];
    let w3 = codes[b * ROWS + row_lane + 48u];
    let at = token_lane * STRIDE + b * 4u;
    var s = sums;
    s = add_word(s, Codes(unpack(w0.x), unpack(w1.x), unpack(w2.x), unpack(w3.x)), at, rounds);
    s = add_word(s, Codes(unpack(w0.y), unpack(w1.y), unpack(w2.y), unpack(w3.y)), at + 1u, rounds);
    s = add_word(s, Codes(unpack(w0.z), unpack(w1.z), unpack(w2.z), unpack(w3.z)), at + 2u, rounds);
    s = add_word(s, Codes(unpack(w0.w), unpack(w1.w), unpack(w2.w), unpack(w3.w)), at + 3u, rounds);
    return s;
}

fn scaled(old: vec4<f32>, sums: vec4<i32>, scale: vec4<f32>, lane: u32) -> vec4<f32> {
    return fma(vec4<f32>(sums - vec4<i32>(tile_sums[lane])), scale, old);
}

fn add_scaled(old: FloatSums, s: Sums, scale: vec4<f32>, lane: u32) -> FloatSums {
    return FloatSums(
        scaled(old.t0, s.t0, scale, lane),
        scaled(old.t1, s.t1, scale, lane + 8u),
        scaled(old.t2, s.t2, scale, lane + 16u),
        scaled(old.t3, s.t3, scale, lane + 24u),
        scaled(old.t4, s.t4, scale, lane + 32u),
        scaled(old.t5, s.t5, scale, lane + 40u),
        scaled(old.t6, s.t6, scale, lane + 48u),
        scaled(old.t7, s.t7, scale, lane + 56u));
}

// Blocks of a round.
fn round_blocks() -> u32 {
    return select(2u, 1u, ACTIVATION == A16);
}

// vec4 `i` of a round's activations that begins at block `first`; zero beyond the last token or block.
fn activation(i: u32, first: u32, first_token: u32, tokens: u32) -> vec4<u32> {
    let token = first_token + i / VECTORS;
    let vector = i % VECTORS;
    if (token < tokens && first + vector * round_blocks() / VECTORS < params.blocks) {
        return x[(token * params.blocks + first) * (VECTORS / round_blocks()) + vector];
    }
    return vec4<u32>(0u);
}

// The sum of a token's block `first + i / TOKENS`.
fn block_sum(i: u32, first: u32, first_token: u32, tokens: u32) -> i32 {
    let token = first_token + i % TOKENS;
    let block = first + i / TOKENS;
    if (i < round_blocks() * TOKENS && token < tokens && block < params.blocks) {
        return x_sums[token * params.blocks + block];
    }
    return 0;
}

// Weights of a row's block `first + i / ROWS`; beyond the last block whatever is there, for the activations are zero.
fn weights(i: u32, first: u32, first_row: u32) -> vec4<u32> {
    let row = min(first_row + i % ROWS, params.n - 1u);
    return w[row * params.blocks + min(first + i / ROWS, params.blocks - 1u)];
}

fn write(token: u32, row: u32, isum: i32, fsum: f32) {
    if (row >= params.n) {
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

// Four rows of a token.
fn write_rows(lane: u32, first_token: u32, tokens: u32, row: u32, isum: vec4<i32>, fsum: vec4<f32>) {
    let token = first_token + lane;
    if (token >= tokens) {
        return;
    }
    let sums = isum - vec4<i32>(tile_sums[lane] + tile_sums[TOKENS + lane]);
    write(token, row, sums.x, fsum.x);
    write(token, row + 16u, sums.y, fsum.y);
    write(token, row + 32u, sums.z, fsum.z);
    write(token, row + 48u, sums.w, fsum.w);
}

fn store_activation(i: u32, v: vec4<u32>) {
    tile[(i / VECTORS) * STRIDE + i % VECTORS] = v;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let first_row = (workgroup.x + workgroup.y * workgroups.x) * ROWS;
    if (first_row >= params.n) {
        return;
    }
    let tokens = select(step.y, step.z, LAST_ROWS == 1u);
    let first_token = workgroup.z * TOKENS;
    let rounds = (tokens - first_token + 7u) / 8u;
    let row_lane = thread % 16u;
    let token_lane = thread / 16u;
    let depth = round_blocks();
    let weight = min(thread, depth * ROWS - 1u);

    var isums = Sums();
    var fsums = FloatSums();
    var own_sum = 0;

    var x0 = activation(thread, 0u, first_token, tokens);
    var x1 = activation(thread + WORKGROUP, 0u, first_token, tokens);
    var x2 = activation(thread + 2u * WORKGROUP, 0u, first_token, tokens);
    var x3 = activation(thread + 3u * WORKGROUP, 0u, first_token, tokens);
    var next_w = weights(weight, 0u, first_row);
    var next_sum = block_sum(thread, 0u, first_token, tokens);

    for (var first = 0u; first < params.blocks; first += depth) {
        workgroupBarrier();
        store_activation(thread, x0);
        store_activation(thread + WORKGROUP, x1);
        store_activation(thread + 2u * WORKGROUP, x2);
        store_activation(thread + 3u * WORKGROUP, x3);
        codes[thread] = next_w;
        tile_sums[thread] = next_sum;
        own_sum += next_sum;
        workgroupBarrier();
        // On their way while this round is computed.
        let following = first + depth;
        x0 = activation(thread, following, first_token, tokens);
        x1 = activation(thread + WORKGROUP, following, first_token, tokens);
        x2 = activation(thread + 2u * WORKGROUP, following, first_token, tokens);
        x3 = activation(thread + 3u * WORKGROUP, following, first_token, tokens);
        next_w = weights(weight, following, first_row);
        next_sum = block_sum(thread, following, first_token, tokens);

        if (SCALE_GROUP == 1u) {
            let rows = min(vec4<u32>(first_row + row_lane) + vec4<u32>(0u, 16u, 32u, 48u), vec4<u32>(params.n - 1u));
            for (var b = 0u; b < depth; b++) {
                // Beyond the last block all sums are zero.
                let block = min(first + b, params.blocks - 1u);
                let scale = vec4<f32>(group_scale(rows.x, block), group_scale(rows.y, block),
                                      group_scale(rows.z, block), group_scale(rows.w, block));
                let sums = add_block(Sums(), b, row_lane, token_lane, rounds);
                fsums = add_scaled(fsums, sums, scale, b * TOKENS + token_lane);
            }
        } else {
            isums = add_block(isums, 0u, row_lane, token_lane, rounds);
            if (ACTIVATION != A16) {
                isums = add_block(isums, 1u, row_lane, token_lane, rounds);
            }
        }
    }

    workgroupBarrier();
    tile_sums[thread] = own_sum;
    workgroupBarrier();
    let row = first_row + row_lane;
    write_rows(token_lane, first_token, tokens, row, isums.t0, fsums.t0);
    write_rows(token_lane + 8u, first_token, tokens, row, isums.t1, fsums.t1);
    write_rows(token_lane + 16u, first_token, tokens, row, isums.t2, fsums.t2);
    write_rows(token_lane + 24u, first_token, tokens, row, isums.t3, fsums.t3);
    write_rows(token_lane + 32u, first_token, tokens, row, isums.t4, fsums.t4);
    write_rows(token_lane + 40u, first_token, tokens, row, isums.t5, fsums.t5);
    write_rows(token_lane + 48u, first_token, tokens, row, isums.t6, fsums.t6);
    write_rows(token_lane + 56u, first_token, tokens, row, isums.t7, fsums.t7);
}
