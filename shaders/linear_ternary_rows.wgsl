// linear_ternary_rows: ternary matrix x up to four tokens of integer activations, with subgroups: as linear_ternary.wgsl, bit
// for bit, for products with scales by row.
//
//   isum[t, n] = sum over K of code[n, i] * q[t, i], minus sum of q[t]      (= sum of trit * q, as code = trit + 1)
//   y[t, n]    = (f32(isum[t, n]) * x_scale[t]) * scale[n], then + bias[n] (BIAS), then + the old y[t, n] (ACCUMULATE)
//
// w        vec2<u32> [N, PAIRS]          read        16 two-bit codes a word
// scales   f32 [N]                       read
// x        vec4<u32> [T, BLOCKS, P, 4]  read        int8, four a word; P = 2 in a16: hi plane, lo plane
// x_scale  f32 [T]                       read
// x_sums   i32 [T, BLOCKS]              read
// bias     f32 [OUT_N]                   read        BIAS only
// y        f32 [T, OUT_N]                read_write  this piece writes columns first_row .. first_row + n - 1
//
// ROWS rows a workgroup, folded over x and y. A subgroup takes 4 / SPLIT rows at a time: its lanes share the columns, two
// words of each row a turn, and add their sums, which are integers, so that neither the size of a subgroup nor which
// threads are in it shows in the result. BLOCKS = ceil(K/64), PAIRS = 2 BLOCKS. T is step.tokens, or step.rows with
// LAST_ROWS, at most TOKENS, at most 4. ROWS is a multiple of 4, WORKGROUP at most 256. SPLIT is 1, or 2: two rows, each in
// two halves. Needs packed_4x8_integer_dot_product and subgroups.

const A16: u32 = 2u;

override WORKGROUP: u32 = 128;
override ROWS: u32 = 16;
override SPLIT: u32 = 1;
override TOKENS: u32 = 1;
override N: u32 = 1;
override BLOCKS: u32 = 1;
override FIRST_ROW: u32 = 0;
override OUT_STRIDE: u32 = 1;
override ACTIVATION: u32 = 1;
override BIAS: u32 = 0;
override ACCUMULATE: u32 = 0;
override LAST_ROWS: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> w: array<vec2<u32>>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x_scale: array<f32>;
@group(0) @binding(6) var<storage, read> x_sums: array<i32>;
@group(0) @binding(7) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<storage, read_write> y: array<f32>;

var<workgroup> subgroups: atomic<u32>;

fn planes() -> u32 {
    return select(1u, 2u, ACTIVATION == A16);
}

fn pairs() -> u32 {
    return 2u * BLOCKS;
}

// Pairs of a row, or of half of one, that a subgroup goes through.
fn span() -> u32 {
    return pairs() / SPLIT;
}

// What the four components are: four rows, or two rows with both of their halves.
fn offsets() -> vec4<u32> {
    return select(vec4<u32>(0u, 1u, 0u, 1u), vec4<u32>(0u, 1u, 2u, 3u), SPLIT == 1u);
}

fn halves() -> vec4<u32> {
    return select(vec4<u32>(0u, 0u, 1u, 1u), vec4<u32>(0u), SPLIT == 1u);
}

// T; one token needs no look at the step.
fn token_count() -> u32 {
    if (TOKENS == 1u) {
        return 1u;
    }
    return min(TOKENS, select(step.y, step.z, LAST_ROWS == 1u));
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

fn dots(c: vec4<u32>, near: u32, far: u32) -> vec4<i32> {
    return vec4<i32>(dot4I8Packed(c.x, near), dot4I8Packed(c.y, near), dot4I8Packed(c.z, far), dot4I8Packed(c.w, far));
}

// near, far: integers of the first two components and of the others.
fn plane_dots(c: Codes, near: vec4<u32>, far: vec4<u32>) -> vec4<i32> {
    return dots(c.c0, near.x, far.x) + dots(c.c1, near.y, far.y) + dots(c.c2, near.z, far.z)
        + dots(c.c3, near.w, far.w);
}

// Less the sums of the activations, which the lanes of a block's first columns take. Tokens beyond the last read the last.
fn token_dots(c: Codes, token: u32, unit: u32, inside: bool) -> vec4<i32> {
    let base = min(token, token_count() - 1u) * BLOCKS;
    let other = unit + 2u * halves().z * span();
    let near = (base + unit / 4u) * planes() * 4u + unit % 4u;
    let far = (base + other / 4u) * planes() * 4u + other % 4u;
    let less = vec4<i32>(vec2<i32>(select(0, x_sums[base + unit / 4u], inside && unit % 4u == 0u)),
                         vec2<i32>(select(0, x_sums[base + other / 4u], inside && other % 4u == 0u)));
    if (ACTIVATION == A16) {
        return plane_dots(c, x[near], x[far]) * 256 + plane_dots(c, x[near + 4u], x[far + 4u]) - less;
    }
    return plane_dots(c, x[near], x[far]) - less;
}

// Adds sixteen columns.
fn add_unit(old: Sums, words: vec4<u32>, unit: u32, inside: bool) -> Sums {
    let c = unpack(words);
    var s = old;
    s.t0 += token_dots(c, 0u, unit, inside);
    if (TOKENS > 1u) {
        s.t1 += token_dots(c, 1u, unit, inside);
        s.t2 += token_dots(c, 2u, unit, inside);
        s.t3 += token_dots(c, 3u, unit, inside);
    }
    return s;
}

// Two words of four rows: 32 columns.
struct Words {
    first: vec4<u32>,
    second: vec4<u32>,
}

fn words_of(rows: vec4<u32>, pair: u32) -> Words {
    let at = rows * pairs() + min(pair, span() - 1u) + halves() * span();
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
    return min((span() + 31u) / 32u, 4u);
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
    let inside = pair < span();
    let own = min(pair, span() - 1u);
    let first = select(vec4<u32>(0u), words.first, inside);
    let second = select(vec4<u32>(0u), words.second, inside);
    return add_unit(add_unit(old, first, 2u * own, inside), second, 2u * own + 1u, inside);
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
    let at = min(row + min(lane, 4u / SPLIT - 1u), N - 1u);
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
fn write(token: u32, own: vec4<i32>, row: u32, end: u32, lane: u32, rest: Row) {
    var all = subgroupAdd(own);
    if (SPLIT == 2u) {
        all += all.zwxy;
    }
    if (lane < 4u / SPLIT && row + lane < end) {
        let sum = select(select(all.x, all.y, lane == 1u), select(all.z, all.w, lane == 3u), lane > 1u);
        var value = f32(sum) * x_scale[token] * rest.scale;
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
    workgroupBarrier();
    let count = atomicLoad(&subgroups);
    let tokens = token_count();
    // Rows beyond the last repeat it and are not written.
    let last = vec4<u32>(N - 1u);
    let taken = 4u / SPLIT;
    for (var row = first + taken * subgroup; row < end; row += taken * count) {
        let rows = min(row + offsets(), last);
        let rest = row_of(row, lane);
        var sums = Sums();
        for (var start = 0u; start < span(); start += batch() * lanes) {
            sums = add_loaded(sums, load(rows, start + lane, lanes), start + lane, lanes);
        }
        write(0u, sums.t0, row, end, lane, rest);
        if (TOKENS > 1u && tokens > 1u) {
            write(1u, sums.t1, row, end, lane, rest);
        }
        if (TOKENS > 1u && tokens > 2u) {
            write(2u, sums.t2, row, end, lane, rest);
        }
        if (TOKENS > 1u && tokens > 3u) {
            write(3u, sums.t3, row, end, lane, rest);
        }
    }
}
