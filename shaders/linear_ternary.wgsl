// linear_ternary: ternary matrix x up to eight tokens of integer activations. Exact in integers, then two products.
//
//   isum[t, n] = sum over K of code[n, i] * q[t, i], minus sum of q[t]      (= sum of trit * q, as code = trit + 1)
//   by row    y[t, n] = (f32(isum[t, n]) * x_scale[t]) * scale[n]
//   by group  y[t, n] = (sum over groups of f32(isum[t, n, g]) * scale[n, g]) * x_scale[t]
//   then + bias[n] (BIAS), then + the old y[t, n] (ACCUMULATE)
//
// w        vec4<u32> [N, BLOCKS]         read        16 two-bit codes a word
// scales   u32 [SCALE_WORDS]             read        f32 [N], or f16 [N, GROUPS] two a word
// x        vec4<u32> [T, BLOCKS, P, 4]   read        int8, four a word; P = 2 in a16: hi plane, lo plane
// x_scale  f32 [T]                       read
// x_sums   i32 [T, BLOCKS]               read
// bias     f32 [OUT_N]                   read        BIAS only
// y        f32 [T, OUT_N]                read_write  this piece writes columns first_row .. first_row + n - 1
//
// ROWS rows a workgroup, folded over x and y. min(BLOCKS, WORKGROUP) lanes share a row: a thread takes a block of 64
// columns of four rows, so that four weight loads are in flight at once and each word is unpacked once for all
// tokens. BLOCKS = ceil(K/64), groups of columns are whole blocks. T is step.tokens, or step.rows with LAST_ROWS, at
// most TOKENS, at most 8. The sums of a token never depend on TOKENS. ROWS is a multiple of 4, WORKGROUP a multiple of
// 16 of at most 256. Needs packed_4x8_integer_dot_product.

const A16: u32 = 2u;

override WORKGROUP: u32 = 256;
override ROWS: u32 = 16;
override TOKENS: u32 = 1;
override N: u32 = 1;
override BLOCKS: u32 = 1;
override GROUPS: u32 = 1;
override GROUP_BLOCKS: u32 = 1;
override FIRST_ROW: u32 = 0;
override OUT_STRIDE: u32 = 1;
override ACTIVATION: u32 = 1;
override SCALE_GROUP: u32 = 0;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;
override LAST_ROWS: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x_scale: array<f32>;
@group(0) @binding(6) var<storage, read> x_sums: array<i32>;
@group(0) @binding(7) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<f32>;

// Bit patterns of i32 (by row) or f32 (by group), one component a row.
var<workgroup> partial: array<vec4<u32>, WORKGROUP>;

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

// Sums of up to eight tokens, one component a row. By name and not in an array, which drivers keep in memory.
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

fn add_partials(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    if (SCALE_GROUP == 1u) {
        return bitcast<vec4<u32>>(bitcast<vec4<f32>>(a) + bitcast<vec4<f32>>(b));
    }
    return a + b;
}

fn planes() -> u32 {
    return select(1u, 2u, ACTIVATION == A16);
}

// T; one token needs no look at the step.
fn token_count() -> u32 {
    if (TOKENS == 1u) {
        return 1u;
    }
    return min(TOKENS, select(step.y, step.z, LAST_ROWS == 1u));
}

// Tokens beyond the last read the last: a branch would cost more.
fn token_of(token: u32) -> u32 {
    return min(token, token_count() - 1u);
}

fn token_dots(c: Codes, token: u32, block: u32, word: u32) -> vec4<i32> {
    let at = (token * BLOCKS + block) * planes() * 4u + word;
    if (ACTIVATION == A16) {
        return dots(c, x[at]) * 256 + dots(c, x[at + 4u]);
    }
    return dots(c, x[at]);
}

// Adds sixteen columns, word `word` of a block.
fn add_word(sums: Sums, c: Codes, block: u32, word: u32) -> Sums {
    var s = sums;
    s.t0 += token_dots(c, token_of(0u), block, word);
    if (TOKENS > 1u) {
        s.t1 += token_dots(c, token_of(1u), block, word);
        s.t2 += token_dots(c, token_of(2u), block, word);
        s.t3 += token_dots(c, token_of(3u), block, word);
    }
    if (TOKENS > 4u) {
        s.t4 += token_dots(c, token_of(4u), block, word);
        s.t5 += token_dots(c, token_of(5u), block, word);
        s.t6 += token_dots(c, token_of(6u), block, word);
        s.t7 += token_dots(c, token_of(7u), block, word);
    }
    return s;
}

fn add_block(w0: vec4<u32>, w1: vec4<u32>, w2: vec4<u32>, w3: vec4<u32>, block: u32) -> Sums {
    var s = Sums();
    s = add_word(s, Codes(unpack(w0.x), unpack(w1.x), unpack(w2.x), unpack(w3.x)), block, 0u);
    s = add_word(s, Codes(unpack(w0.y), unpack(w1.y), unpack(w2.y), unpack(w3.y)), block, 1u);
    s = add_word(s, Codes(unpack(w0.z), unpack(w1.z), unpack(w2.z), unpack(w3.z)), block, 2u);
    s = add_word(s, Codes(unpack(w0.w), unpack(w1.w), unpack(w2.w), unpack(w3.w)), block, 3u);
    return s;
}

fn block_sum(token: u32, block: u32) -> i32 {
    return x_sums[token * BLOCKS + block];
}

// Adds the sums of a block, less those of its activations, to those of a row or, with their scales, of the groups.
fn add_sums(isums: Sums, s: Sums, block: u32) -> Sums {
    var i = isums;
    i.t0 += s.t0 - vec4<i32>(block_sum(token_of(0u), block));
    if (TOKENS > 1u) {
        i.t1 += s.t1 - vec4<i32>(block_sum(token_of(1u), block));
        i.t2 += s.t2 - vec4<i32>(block_sum(token_of(2u), block));
        i.t3 += s.t3 - vec4<i32>(block_sum(token_of(3u), block));
    }
    if (TOKENS > 4u) {
        i.t4 += s.t4 - vec4<i32>(block_sum(token_of(4u), block));
        i.t5 += s.t5 - vec4<i32>(block_sum(token_of(5u), block));
        i.t6 += s.t6 - vec4<i32>(block_sum(token_of(6u), block));
        i.t7 += s.t7 - vec4<i32>(block_sum(token_of(7u), block));
    }
    return i;
}

fn add_scaled(fsums: FloatSums, s: Sums, rows: vec4<u32>, block: u32) -> FloatSums {
    let scale = vec4<f32>(group_scale(rows.x, block), group_scale(rows.y, block),
                          group_scale(rows.z, block), group_scale(rows.w, block));
    var f = fsums;
    f.t0 = fma(vec4<f32>(s.t0 - vec4<i32>(block_sum(token_of(0u), block))), scale, f.t0);
    if (TOKENS > 1u) {
        f.t1 = fma(vec4<f32>(s.t1 - vec4<i32>(block_sum(token_of(1u), block))), scale, f.t1);
        f.t2 = fma(vec4<f32>(s.t2 - vec4<i32>(block_sum(token_of(2u), block))), scale, f.t2);
        f.t3 = fma(vec4<f32>(s.t3 - vec4<i32>(block_sum(token_of(3u), block))), scale, f.t3);
    }
    if (TOKENS > 4u) {
        f.t4 = fma(vec4<f32>(s.t4 - vec4<i32>(block_sum(token_of(4u), block))), scale, f.t4);
        f.t5 = fma(vec4<f32>(s.t5 - vec4<i32>(block_sum(token_of(5u), block))), scale, f.t5);
        f.t6 = fma(vec4<f32>(s.t6 - vec4<i32>(block_sum(token_of(6u), block))), scale, f.t6);
        f.t7 = fma(vec4<f32>(s.t7 - vec4<i32>(block_sum(token_of(7u), block))), scale, f.t7);
    }
    return f;
}

fn write(token: u32, row: u32, sum: u32) {
    var value: f32;
    if (SCALE_GROUP == 1u) {
        value = bitcast<f32>(sum) * x_scale[token];
    } else {
        value = f32(bitcast<i32>(sum)) * x_scale[token] * bitcast<f32>(scales[row]);
    }
    let column = FIRST_ROW + row;
    let at = token * OUT_STRIDE + column;
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

// The sums of all lanes, of one token, to y.
fn finish(token: u32, isum: vec4<i32>, fsum: vec4<f32>, start: u32, end: u32, thread: u32) {
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
        write(token, start + thread, sum[thread & 3u]);
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
    let tokens = token_count();
    let end = min(first + ROWS, N);
    let lanes = min(BLOCKS, WORKGROUP);
    let groups = WORKGROUP / lanes;
    let group = thread / lanes;
    let lane = thread % lanes;

    for (var start = first; start < end; start += groups * 4u) {
        let row = start + group * 4u;
        var isums = Sums();
        var fsums = FloatSums();
        if (group < groups && row < end) {
            // Rows beyond the last repeat it and are not written.
            let rows = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
            for (var block = lane; block < BLOCKS; block += lanes) {
                let s = add_block(w[rows.x * BLOCKS + block], w[rows.y * BLOCKS + block],
                                  w[rows.z * BLOCKS + block], w[rows.w * BLOCKS + block], block);
                if (SCALE_GROUP == 1u) {
                    fsums = add_scaled(fsums, s, rows, block);
                } else {
                    isums = add_sums(isums, s, block);
                }
            }
        }
        finish(0u, isums.t0, fsums.t0, start, end, thread);
        if (tokens > 1u) {
            finish(1u, isums.t1, fsums.t1, start, end, thread);
        }
        if (tokens > 2u) {
            finish(2u, isums.t2, fsums.t2, start, end, thread);
        }
        if (tokens > 3u) {
            finish(3u, isums.t3, fsums.t3, start, end, thread);
        }
        if (tokens > 4u) {
            finish(4u, isums.t4, fsums.t4, start, end, thread);
        }
        if (tokens > 5u) {
            finish(5u, isums.t5, fsums.t5, start, end, thread);
        }
        if (tokens > 6u) {
            finish(6u, isums.t6, fsums.t6, start, end, thread);
        }
        if (tokens > 7u) {
            finish(7u, isums.t7, fsums.t7, start, end, thread);
        }
    }
}
