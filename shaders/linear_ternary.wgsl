// linear_ternary: ternary matrix x one token of integer activations. Exact in integers, then two products.
//
//   isum[n] = sum over K of code[n, i] * q[i], minus sum of q        (= sum of trit * q, as code = trit + 1)
//   by row    y[n] = (f32(isum[n]) * x_scale) * scale[n]
//   by group  y[n] = (sum over groups of f32(isum[n, g]) * scale[n, g]) * x_scale
//   then + bias[n] (BIAS), then + the old y[n] (ACCUMULATE)
//
// w        vec4<u32> [N, ceil(K/64)]         read        16 two-bit codes a word
// scales   u32 [SCALE_WORDS]                 read        f32 [N], or f16 [N, GROUPS] two a word
// x        vec4<u32> [1, ceil(K/64), P, 4]   read        int8, four a word; P = 2 in a16: hi plane, lo plane
// x_scale  f32 [1]                           read
// x_sums   i32 [1, ceil(K/64)]               read
// bias     f32 [OUT_N]                       read        BIAS only
// y        f32 [1, OUT_N]                    read_write  this piece writes first_row .. first_row + n - 1
//
// Four rows a workgroup, folded over x and y; a thread takes every WORKGROUP-th block of 64 columns of all
// four, so that four weight loads are in flight and the activations are loaded once. Groups are whole blocks.
// WORKGROUP is a multiple of 16, at most 256. Needs packed_4x8_integer_dot_product.

const A16: u32 = 2u;

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

@group(0) @binding(0) var<uniform> params: Params;
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
    let index = row * params.groups + block / params.group_blocks;
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

// Sixteen codes of a word times sixteen int8.
fn dot_word(codes: u32, v: vec4<u32>) -> i32 {
    return dot4I8Packed(codes & 0x03030303u, v.x) + dot4I8Packed((codes >> 2u) & 0x03030303u, v.y)
         + dot4I8Packed((codes >> 4u) & 0x03030303u, v.z) + dot4I8Packed((codes >> 6u) & 0x03030303u, v.w);
}

// One plane of a block of 64: one sum a row.
fn dot_block(w0: vec4<u32>, w1: vec4<u32>, w2: vec4<u32>, w3: vec4<u32>, at: u32) -> vec4<i32> {
    let x0 = x[at];
    let x1 = x[at + 1u];
    let x2 = x[at + 2u];
    let x3 = x[at + 3u];
    return vec4<i32>(
        dot_word(w0.x, x0) + dot_word(w0.y, x1) + dot_word(w0.z, x2) + dot_word(w0.w, x3),
        dot_word(w1.x, x0) + dot_word(w1.y, x1) + dot_word(w1.z, x2) + dot_word(w1.w, x3),
        dot_word(w2.x, x0) + dot_word(w2.y, x1) + dot_word(w2.z, x2) + dot_word(w2.w, x3),
        dot_word(w3.x, x0) + dot_word(w3.y, x1) + dot_word(w3.z, x2) + dot_word(w3.w, x3));
}

fn add_partials(a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    if (SCALE_GROUP == 1u) {
        return bitcast<vec4<u32>>(bitcast<vec4<f32>>(a) + bitcast<vec4<f32>>(b));
    }
    return a + b;
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
    let base = rows * params.blocks;

    var isum = vec4<i32>(0);
    var fsum = vec4<f32>(0.0);
    for (var block = thread; block < params.blocks; block += WORKGROUP) {
        let w0 = w[base.x + block];
        let w1 = w[base.y + block];
        let w2 = w[base.z + block];
        let w3 = w[base.w + block];
        var sums: vec4<i32>;
        if (ACTIVATION == A16) {
            sums = dot_block(w0, w1, w2, w3, block * 8u) * 256 + dot_block(w0, w1, w2, w3, block * 8u + 4u);
        } else {
            sums = dot_block(w0, w1, w2, w3, block * 4u);
        }
        sums -= vec4<i32>(x_sums[block]);
        if (SCALE_GROUP == 1u) {
            fsum += vec4<f32>(sums) * vec4<f32>(group_scale(rows.x, block), group_scale(rows.y, block),
                                                group_scale(rows.z, block), group_scale(rows.w, block));
        } else {
            isum += sums;
        }
    }

    partial[thread] = select(bitcast<vec4<u32>>(isum), bitcast<vec4<u32>>(fsum), SCALE_GROUP == 1u);
    workgroupBarrier();
    if (thread < 16u) {
        var total = partial[thread];
        for (var i = thread + 16u; i < WORKGROUP; i += 16u) {
            total = add_partials(total, partial[i]);
        }
        partial[thread] = total;
    }
    workgroupBarrier();
    if (thread < 4u && row + thread < params.n) {
        var total = partial[0];
        for (var i = 1u; i < 16u; i++) {
            total = add_partials(total, partial[i]);
        }
        var value: f32;
        if (SCALE_GROUP == 1u) {
            value = bitcast<f32>(total[thread]) * x_scale[0];
        } else {
            value = f32(bitcast<i32>(total[thread])) * x_scale[0] * bitcast<f32>(scales[row + thread]);
        }
        let column = params.first_row + row + thread;
        // Left out, not multiplied by zero: without them the result is products alone, which no compiler
        // may contract, and equals the reference bit for bit.
        if (BIAS == 1u) {
            value += bias[column];
        }
        if (ACCUMULATE == 1u) {
            value += y[column];
        }
        y[column] = value;
    }
}
