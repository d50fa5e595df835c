// dequantize: rows of a weight tensor in any resident encoding -> f32.
// embed (GATHER = 1): the rows that `ids` names, times `multiplier`.
//
//   dequantize  y[row, i] = value(w[row, i]) * multiplier                            row = 0 .. N-1
//   embed       y[t, i]   = value(w[ids[t] - first_row, i]) * multiplier             t = 0 .. T-1
//               a token whose row lies in another piece of the tensor is left alone
//
// w       u32 [N, ROW_WORDS]    read    ternary codes, q8, q4, f16 or f32 (shaders/README.md has the layouts)
// scales  u32 [SCALE_WORDS]     read    ternary by row: f32 [N]; by group, q8, q4: f16 [N, GROUPS], two a word
// ids     u32 [T]               read    GATHER only
// y       f32 [N or T, K]       write
//
// One workgroup a row or token, folded over x and y. Needs no limit above WebGPU's defaults.

const TERNARY: u32 = 0u;
const Q8: u32 = 1u;
const Q4: u32 = 2u;
const F16: u32 = 3u;

struct Params {
    rows: u32,
    k: u32,
    row_words: u32,
    groups: u32,
    group: u32,
    first_row: u32,
    multiplier: f32,
}

override WORKGROUP: u32 = 64;
override ENCODING: u32 = 0;
override SCALE_GROUP: u32 = 0;
override GATHER: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> w: array<u32>;
@group(0) @binding(3) var<storage, read> scales: array<u32>;
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

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

// Elements 4*quad .. 4*quad+3 of a row, without the scale.
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
    } else if (ENCODING == F16) {
        let low = w[base + 2u * quad];
        let high = w[base + 2u * quad + 1u];
        return vec4<f32>(half(low), half(low >> 16u), half(high), half(high >> 16u));
    }
    let at = base + 4u * quad;
    return vec4<f32>(bitcast<f32>(w[at]), bitcast<f32>(w[at + 1u]), bitcast<f32>(w[at + 2u]), bitcast<f32>(w[at + 3u]));
}

// A group never straddles four aligned elements.
fn scale_of(row: u32, quad: u32) -> f32 {
    if (ENCODING >= F16) {
        return 1.0;
    }
    if (ENCODING == TERNARY && SCALE_GROUP == 0u) {
        return bitcast<f32>(scales[row]);
    }
    let index = row * params.groups + (quad * 4u) / params.group;
    return half(scales[index >> 1u] >> (16u * (index & 1u)));
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let group = workgroup.x + workgroup.y * workgroups.x;
    var row = group;
    if (GATHER == 1u) {
        // An id below first_row wraps to a large number.
        row = ids[group] - params.first_row;
    }
    if (row >= params.rows) {
        return;
    }
    let out = group * params.k;
    for (var i = thread * 4u; i < params.k; i += WORKGROUP * 4u) {
        let values = four(row, i >> 2u) * scale_of(row, i >> 2u) * params.multiplier;
        y[out + i] = values.x;
        if (i + 1u < params.k) {
            y[out + i + 1u] = values.y;
        }
        if (i + 2u < params.k) {
            y[out + i + 2u] = values.z;
        }
        if (i + 3u < params.k) {
            y[out + i + 3u] = values.w;
        }
    }
}
