// rope_append: rotates the query and key heads of a fused q|k|v row, writes the queries to q and appends keys
// and values to the cache, in the cache's storage kind.
//
//   u[i] = x[i]                                              HEAD_NORM = 0
//   u[i] = x[i] * (1 / sqrt(mean(x^2) + eps)) * gains[g, i]  HEAD_NORM = 1; g = 0 in query heads, 1 in key heads
//   c, s = rope[position + t, i], i < D/2
//   out[i]       = u[i] * c - u[i + D/2] * s
//   out[i + D/2] = u[i + D/2] * c + u[i] * s                 (rotate_half; values are neither normed nor rotated)
//   cache row = position + t:
//   KV 0 (f32)  the bits
//   KV 1 (f16)  two halves a word, clamped to +-65504
//   KV 2 (q8)   scale = max |v| / 127, q = clamp(round(v / scale), -127, 127), four int8 a word; zero for an all-zero head
//
// x        f32 [T, (heads + 2*kv_heads) * D]  read        query, key, value heads
// rope     vec2<f32> [S, D/2]                 read        cos, sin
// gains    f32 [2, D]                         read        HEAD_NORM only: of queries, of keys
// q        f32 [T, heads, D]                  write
// k_cache  u32 [S, kv_heads, KV_WORDS]        read_write  rows position .. position + T - 1
// k_scale  f32 [S, kv_heads]                  read_write  q8 only
// v_cache  u32 [S, kv_heads, KV_WORDS]        read_write
// v_scale  f32 [S, kv_heads]                  read_write  q8 only
//
// One workgroup a head (folded over x and y) and token (z). D is a multiple of 4, at most 256. WORKGROUP is a
// multiple of 16, at most 256.

const KV_F16: u32 = 1u;
const KV_Q8: u32 = 2u;

struct Params {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    eps: f32,
}

override WORKGROUP: u32 = 64;
override KV: u32 = 1;
override HEAD_NORM: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read> gains: array<f32>;
@group(0) @binding(5) var<storage, read_write> q: array<f32>;
@group(0) @binding(6) var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(7) var<storage, read_write> k_scale: array<f32>;
@group(0) @binding(8) var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(9) var<storage, read_write> v_scale: array<f32>;

var<workgroup> head_values: array<f32, 256>;
// Bit patterns of absolute values, where NaN is above infinity.
var<workgroup> maxima: array<u32, WORKGROUP>;

var<workgroup> squares: array<f32, WORKGROUP>;

// 1 / sqrt(mean(x^2) + eps) of a head; every thread gets it.
fn norm_factor(first: u32, thread: u32) -> f32 {
    var own = 0.0;
    for (var i = thread; i < params.head_dim; i += WORKGROUP) {
        own += x[first + i] * x[first + i];
    }
    squares[thread] = own;
    workgroupBarrier();
    if (thread < 16u) {
        own = 0.0;
        for (var i = thread; i < WORKGROUP; i += 16u) {
            own += squares[i];
        }
        squares[thread] = own;
    }
    workgroupBarrier();
    var all = 0.0;
    for (var i = 0u; i < 16u; i++) {
        all += squares[i];
    }
    return inverseSqrt(all / f32(params.head_dim) + params.eps);
}

// Value i of a query or key head before the rotation.
fn head_value(first: u32, i: u32, factor: f32, gain: u32) -> f32 {
    if (HEAD_NORM == 1u) {
        return x[first + i] * factor * gains[gain + i];
    }
    return x[first + i];
}

// Value i of a query or key head, rotated. `gain`: where its gains begin.
fn rotated(first: u32, row: u32, i: u32, factor: f32, gain: u32) -> f32 {
    let half_dim = params.head_dim / 2u;
    if (i < half_dim) {
        let c = rope[row * half_dim + i];
        return head_value(first, i, factor, gain) * c.x - head_value(first, i + half_dim, factor, gain) * c.y;
    }
    let c = rope[row * half_dim + i - half_dim];
    return head_value(first, i, factor, gain) * c.x + head_value(first, i - half_dim, factor, gain) * c.y;
}

fn largest_bits(thread: u32) -> u32 {
    var own = 0u;
    for (var i = thread; i < params.head_dim; i += WORKGROUP) {
        own = max(own, bitcast<u32>(head_values[i]) & 0x7fffffffu);
    }
    maxima[thread] = own;
    workgroupBarrier();
    var all = 0u;
    for (var i = 0u; i < WORKGROUP; i++) {
        all = max(all, maxima[i]);
    }
    return all;
}

fn byte_of(v: f32, to_integer: f32) -> u32 {
    return bitcast<u32>(i32(clamp(round(v * to_integer), -127.0, 127.0))) & 255u;
}

// Word i of the cache row of this head.
fn word(i: u32, to_integer: f32) -> u32 {
    if (KV == KV_Q8) {
        let e = i * 4u;
        return byte_of(head_values[e], to_integer) | (byte_of(head_values[e + 1u], to_integer) << 8u)
             | (byte_of(head_values[e + 2u], to_integer) << 16u) | (byte_of(head_values[e + 3u], to_integer) << 24u);
    } else if (KV == KV_F16) {
        return pack2x16float(clamp(vec2<f32>(head_values[2u * i], head_values[2u * i + 1u]),
                                   vec2<f32>(-65504.0), vec2<f32>(65504.0)));
    }
    return bitcast<u32>(head_values[i]);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let head = workgroup.x + workgroup.y * workgroups.x;
    let all_heads = params.heads + 2u * params.kv_heads;
    if (head >= all_heads) {
        return;
    }
    let t = workgroup.z;
    let row = step.x + t;
    let head_dim = params.head_dim;
    let first = (t * all_heads + head) * head_dim;
    let is_key = head < params.heads + params.kv_heads;
    var factor = 1.0;
    if (HEAD_NORM == 1u && is_key) {
        factor = norm_factor(first, thread);
    }

    if (head < params.heads) {
        let out = (t * params.heads + head) * head_dim;
        for (var i = thread; i < head_dim; i += WORKGROUP) {
            q[out + i] = rotated(first, row, i, factor, 0u);
        }
        return;
    }

    for (var i = thread; i < head_dim; i += WORKGROUP) {
        if (is_key) {
            head_values[i] = rotated(first, row, i, factor, head_dim);
        } else {
            head_values[i] = x[first + i];
        }
    }
    workgroupBarrier();

    var to_integer = 0.0;
    var scale = 0.0;
    if (KV == KV_Q8) {
        let bits = largest_bits(thread);
        let largest = bitcast<f32>(bits);
        if (bits != 0u) {
            to_integer = 127.0 / largest;
            // An infinity or NaN stays in the scale, so that it cannot get lost.
            scale = select(largest / 127.0, largest, bits >= 0x7f800000u);
        }
    }
    let words = head_dim / select(select(1u, 2u, KV == KV_F16), 4u, KV == KV_Q8);
    let kv_head = (head - params.heads) % params.kv_heads;
    let slot = row * params.kv_heads + kv_head;
    for (var i = thread; i < words; i += WORKGROUP) {
        if (is_key) {
            k_cache[slot * words + i] = word(i, to_integer);
        } else {
            v_cache[slot * words + i] = word(i, to_integer);
        }
    }
    if (KV == KV_Q8 && thread == 0u) {
        if (is_key) {
            k_scale[slot] = scale;
        } else {
            v_scale[slot] = scale;
        }
    }
}
