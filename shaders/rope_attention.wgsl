// rope_attention: rotary embedding, cache append and attention of up to eight tokens, split over the context: each
// workgroup takes 128 keys of one kv head for all query heads that share it. attention_merge joins the parts.
//
//   q, k rotated and k, v appended as in rope_append.wgsl (rows position .. position + T - 1)
//   keys j of chunk c: 128 c .. min(128 c + 127, position + t)
//   s[j] = scale * sum over D of q[t, h, i] * k[j, g, i],  m = max s,  p[j] = exp(s[j] - m)
//   parts[t, h, c] = (sum of p[j] v[j, g, i] for i < D,  m,  sum of p[j])
//
// x        f32 [T, (heads + 2*kv_heads) * D]      read        query, key, value heads
// rope     vec2<f32> [S, D/2]                     read        cos, sin
// k_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]    read_write  KV 0 f32, 1 two f16 a word, 2 four int8 a word
// k_scale  f32 [S, kv_heads]                      read_write  q8 only
// v_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]    read_write
// v_scale  f32 [S, kv_heads]                      read_write  q8 only
// parts    vec4<f32> [T, heads, CHUNKS, D/4 + 1]  read_write  chunks 0 .. (position + t) / 128; m, sum in the last vec4
//
// One workgroup a kv head (along x) and chunk (y); those beyond the last key end at once. The new keys are appended by the
// workgroup whose chunk they lie in, and read there after a barrier; no other one looks at them. A part depends on its
// keys and its token alone, whatever T is. D is a multiple of 16, at most 256; at most eight query heads a kv head, with
// together at most 1024 dimensions. WORKGROUP is 128: a thread a key.

const KV_F16: u32 = 1u;
const KV_Q8: u32 = 2u;
const LOWEST: f32 = -3.0e38;

override WORKGROUP: u32 = 128;
override KV: u32 = 1;
override HEADS: u32 = 1;
override KV_HEADS: u32 = 1;
override HEAD_DIM: u32 = 64;
override CHUNKS: u32 = 1;
override SCALE: f32 = 1.0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> k_scale: array<f32>;
@group(0) @binding(6) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> v_scale: array<f32>;
@group(0) @binding(8) var<storage, read_write> parts: array<vec4<f32>>;

// First half: [query head of the group, D/4]; second half: a key and a value head that are appended, as floats. After the
// scores all of it: the shares of the mixed values, a vec4 for each of four heads a thread.
var<workgroup> query: array<vec4<f32>, 512>;
// Of each key, for four heads: the scores, then exp(score - max).
var<workgroup> scores: array<vec4<f32>, 128>;
var<workgroup> maxima: array<vec4<f32>, 8>;
// Sums of exp(score - max) of the shares.
var<workgroup> weights: array<vec4<f32>, 128>;

fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(word << 24u), bitcast<i32>(word << 16u),
                               bitcast<i32>(word << 8u), bitcast<i32>(word)) >> vec4<u32>(24u));
}

// vec4s of a head's row in a cache.
fn row_vectors() -> u32 {
    return HEAD_DIM / select(select(4u, 8u, KV == KV_F16), 16u, KV == KV_Q8);
}

// Quads (four dimensions) in a vec4 of the cache.
fn vector_quads() -> u32 {
    return select(select(1u, 2u, KV == KV_F16), 4u, KV == KV_Q8);
}

// Quad `i` of a vec4 of the cache, without the q8 scale.
fn quad_of(v: vec4<u32>, i: u32) -> vec4<f32> {
    if (KV == KV_Q8) {
        return signed_bytes(v[i]);
    } else if (KV == KV_F16) {
        return vec4<f32>(unpack2x16float(v[2u * i]), unpack2x16float(v[2u * i + 1u]));
    }
    return bitcast<vec4<f32>>(v);
}

// Value i of a query or key head, rotated.
fn rotated(first: u32, row: u32, i: u32) -> f32 {
    let half_dim = HEAD_DIM / 2u;
    if (i < half_dim) {
        let c = rope[row * half_dim + i];
        return x[first + i] * c.x - x[first + i + half_dim] * c.y;
    }
    let c = rope[row * half_dim + i - half_dim];
    return x[first + i] * c.x + x[first + i - half_dim] * c.y;
}

fn rotated_quad(first: u32, row: u32, quad: u32) -> vec4<f32> {
    let i = quad * 4u;
    return vec4<f32>(rotated(first, row, i), rotated(first, row, i + 1u),
                     rotated(first, row, i + 2u), rotated(first, row, i + 3u));
}

fn plain_quad(first: u32, quad: u32) -> vec4<f32> {
    let i = first + quad * 4u;
    return vec4<f32>(x[i], x[i + 1u], x[i + 2u], x[i + 3u]);
}

fn pack_quad(v: vec4<f32>, to_integer: f32) -> u32 {
    let q = bitcast<vec4<u32>>(vec4<i32>(clamp(round(v * to_integer), vec4<f32>(-127.0), vec4<f32>(127.0))))
        & vec4<u32>(255u);
    return q.x | (q.y << 8u) | (q.z << 16u) | (q.w << 24u);
}

fn pack_halves(v: vec4<f32>) -> vec2<u32> {
    let c = clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    return vec2<u32>(pack2x16float(c.xy), pack2x16float(c.zw));
}

// vec4 `i` of the head that lies in `query` from `first` on.
fn cache_vector(first: u32, i: u32, to_integer: f32) -> vec4<u32> {
    let at = first + i * vector_quads();
    if (KV == KV_Q8) {
        return vec4<u32>(pack_quad(query[at], to_integer), pack_quad(query[at + 1u], to_integer),
                         pack_quad(query[at + 2u], to_integer), pack_quad(query[at + 3u], to_integer));
    } else if (KV == KV_F16) {
        return vec4<u32>(pack_halves(query[at]), pack_halves(query[at + 1u]));
    }
    return bitcast<vec4<u32>>(query[at]);
}

// Bits of the largest |value| of the head in `query` from `first` on, where NaN is above infinity.
fn largest_bits(first: u32) -> u32 {
    var all = 0u;
    for (var i = 0u; i < HEAD_DIM / 4u; i++) {
        let bits = bitcast<vec4<u32>>(query[first + i]) & vec4<u32>(0x7fffffffu);
        all = max(all, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    return all;
}

// Append the key and the value of token t: the first half of the threads the key, the others the value.
fn append(t: u32, row: u32, kv_head: u32, thread: u32) {
    let quads = HEAD_DIM / 4u;
    let is_key = thread < WORKGROUP / 2u;
    let own = thread % (WORKGROUP / 2u);
    let head = HEADS + kv_head + select(KV_HEADS, 0u, is_key);
    let first = (t * (HEADS + 2u * KV_HEADS) + head) * HEAD_DIM;
    let place = 256u + select(quads, 0u, is_key);
    workgroupBarrier();
    if (own < quads) {
        if (is_key) {
            query[place + own] = rotated_quad(first, row, own);
        } else {
            query[place + own] = plain_quad(first, own);
        }
    }
    workgroupBarrier();
    let vectors = row_vectors();
    if (own >= vectors) {
        return;
    }
    var to_integer = 0.0;
    let slot = row * KV_HEADS + kv_head;
    if (KV == KV_Q8) {
        let bits = largest_bits(place);
        let largest = bitcast<f32>(bits);
        var scale = 0.0;
        if (bits != 0u) {
            to_integer = 127.0 / largest;
            // An infinity or NaN stays in the scale, so that it cannot get lost.
            scale = select(largest / 127.0, largest, bits >= 0x7f800000u);
        }
        if (own == 0u) {
            if (is_key) {
                k_scale[slot] = scale;
            } else {
                v_scale[slot] = scale;
            }
        }
    }
    let packed = cache_vector(place, own, to_integer);
    if (is_key) {
        k_cache[slot * vectors + own] = packed;
    } else {
        v_cache[slot * vectors + own] = packed;
    }
}

fn quad_dots(k: vec4<f32>, at: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(dot(query[at.x], k), dot(query[at.y], k), dot(query[at.z], k), dot(query[at.w], k));
}

// vec4 `i` of a key by those columns of four queries, which begin at `heads`.
fn key_dots(v: vec4<u32>, heads: vec4<u32>, i: u32) -> vec4<f32> {
    let at = heads + i * vector_quads();
    var sums = quad_dots(quad_of(v, 0u), at);
    if (KV != 0u) {
        sums += quad_dots(quad_of(v, 1u), at + 1u);
    }
    if (KV == KV_Q8) {
        sums += quad_dots(quad_of(v, 2u), at + 2u) + quad_dots(quad_of(v, 3u), at + 3u);
    }
    return sums;
}

// Scores of one key for four query heads from `first` on, of which the last may repeat.
fn score(slot: u32, first: u32) -> vec4<f32> {
    let quads = HEAD_DIM / 4u;
    let vectors = row_vectors();
    let heads = min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(HEADS / KV_HEADS - 1u)) * quads;
    var sums = vec4<f32>(0.0);
    // Eight loads in flight.
    for (var i = 0u; i < vectors; i += 8u) {
        let last = vectors - 1u;
        let at = slot * vectors;
        let v0 = k_cache[at + i];
        let v1 = k_cache[at + min(i + 1u, last)];
        let v2 = k_cache[at + min(i + 2u, last)];
        let v3 = k_cache[at + min(i + 3u, last)];
        let v4 = k_cache[at + min(i + 4u, last)];
        let v5 = k_cache[at + min(i + 5u, last)];
        let v6 = k_cache[at + min(i + 6u, last)];
        let v7 = k_cache[at + min(i + 7u, last)];
        sums += key_dots(v0, heads, i);
        if (i + 1u < vectors) {
            sums += key_dots(v1, heads, i + 1u);
        }
        if (i + 2u < vectors) {
            sums += key_dots(v2, heads, i + 2u);
        }
        if (i + 3u < vectors) {
            sums += key_dots(v3, heads, i + 3u);
        }
        if (i + 4u < vectors) {
            sums += key_dots(v4, heads, i + 4u);
        }
        if (i + 5u < vectors) {
            sums += key_dots(v5, heads, i + 5u);
        }
        if (i + 6u < vectors) {
            sums += key_dots(v6, heads, i + 6u);
        }
        if (i + 7u < vectors) {
            sums += key_dots(v7, heads, i + 7u);
        }
    }
    if (KV == KV_Q8) {
        return sums * (SCALE * k_scale[slot]);
    }
    return sums * SCALE;
}

// A quad of dimensions of a value.
fn value_of(slot: u32, quad: u32) -> vec4<f32> {
    let v = v_cache[slot * row_vectors() + quad / vector_quads()];
    let own = quad_of(v, quad % vector_quads());
    if (KV == KV_Q8) {
        return own * v_scale[slot];
    }
    return own;
}

// Sums of four heads: a quad of the mixed values each, and of the weights.
struct Mixed {
    h0: vec4<f32>,
    h1: vec4<f32>,
    h2: vec4<f32>,
    h3: vec4<f32>,
    weight: vec4<f32>,
}

// Adds a key's value, weighted, if it counts.
fn mix(old: Mixed, v: vec4<f32>, key: u32, counts: bool) -> Mixed {
    let p = select(vec4<f32>(0.0), scores[key], counts);
    return Mixed(fma(vec4<f32>(p.x), v, old.h0), fma(vec4<f32>(p.y), v, old.h1),
                 fma(vec4<f32>(p.z), v, old.h2), fma(vec4<f32>(p.w), v, old.h3), old.weight + p);
}

// The largest score of each of four heads; every thread gets it.
fn largest_score(thread: u32, own: vec4<f32>) -> vec4<f32> {
    scores[thread] = own;
    workgroupBarrier();
    var largest = scores[thread & 112u];
    for (var i = 1u; i < 16u; i++) {
        largest = max(largest, scores[(thread & 112u) + i]);
    }
    if ((thread & 15u) == 0u) {
        maxima[thread >> 4u] = largest;
    }
    workgroupBarrier();
    largest = maxima[0];
    for (var i = 1u; i < 8u; i++) {
        largest = max(largest, maxima[i]);
    }
    return largest;
}

fn load_queries(t: u32, row: u32, kv_head: u32, thread: u32) {
    let group_heads = HEADS / KV_HEADS;
    let quads = HEAD_DIM / 4u;
    for (var i = thread; i < group_heads * quads; i += WORKGROUP) {
        let head = kv_head * group_heads + i / quads;
        query[i] = rotated_quad((t * (HEADS + 2u * KV_HEADS) + head) * HEAD_DIM, row, i % quads);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let kv_head = workgroup.x;
    let chunk = workgroup.y;
    let position = step.x;
    let tokens = step.y;
    let start = chunk * 128u;
    if (start >= position + tokens) {
        return;
    }
    let group_heads = HEADS / KV_HEADS;
    let quads = HEAD_DIM / 4u;
    let shares = WORKGROUP / quads;
    let share = thread / quads;
    let quad = thread % quads;

    // With the first token's heads, whose loads then overlap.
    load_queries(0u, position, kv_head, thread);
    for (var t = 0u; t < tokens; t++) {
        let row = position + t;
        if (row / 128u == chunk) {
            append(t, row, kv_head, thread);
        }
    }
    storageBarrier();
    workgroupBarrier();

    for (var t = 0u; t < tokens; t++) {
        let row = position + t;
        if (start > row) {
            continue;
        }
        let keys = min(128u, row + 1u - start);
        let key = start + min(thread, keys - 1u);
        for (var first = 0u; first < group_heads; first += 4u) {
            if (t > 0u || first > 0u) {
                workgroupBarrier();
                load_queries(t, row, kv_head, thread);
                workgroupBarrier();
            }
            // A thread beyond the last key scores that one, and its score counts for nothing.
            let own = select(vec4<f32>(LOWEST), score(key * KV_HEADS + kv_head, first), thread < keys);
            let largest = largest_score(thread, own);
            scores[thread] = select(vec4<f32>(0.0), exp(own - largest), thread < keys);
            workgroupBarrier();

            // A thread takes a quad of dimensions of every `shares`-th key, eight loads in flight.
            var mixed = Mixed();
            if (share < shares) {
                for (var j = share; j < keys; j += 8u * shares) {
                    let at = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u) * shares;
                    let more = at + 4u * shares;
                    let slots = (start + min(at, vec4<u32>(keys - 1u))) * KV_HEADS + kv_head;
                    let others = (start + min(more, vec4<u32>(keys - 1u))) * KV_HEADS + kv_head;
                    let v0 = value_of(slots.x, quad);
                    let v1 = value_of(slots.y, quad);
                    let v2 = value_of(slots.z, quad);
                    let v3 = value_of(slots.w, quad);
                    let v4 = value_of(others.x, quad);
                    let v5 = value_of(others.y, quad);
                    let v6 = value_of(others.z, quad);
                    let v7 = value_of(others.w, quad);
                    mixed = mix(mixed, v0, at.x, true);
                    mixed = mix(mixed, v1, min(at.y, 127u), at.y < keys);
                    mixed = mix(mixed, v2, min(at.z, 127u), at.z < keys);
                    mixed = mix(mixed, v3, min(at.w, 127u), at.w < keys);
                    mixed = mix(mixed, v4, min(more.x, 127u), more.x < keys);
                    mixed = mix(mixed, v5, min(more.y, 127u), more.y < keys);
                    mixed = mix(mixed, v6, min(more.z, 127u), more.z < keys);
                    mixed = mix(mixed, v7, min(more.w, 127u), more.w < keys);
                }
            }
            query[thread] = mixed.h0;
            query[128u + thread] = mixed.h1;
            query[256u + thread] = mixed.h2;
            query[384u + thread] = mixed.h3;
            weights[thread] = mixed.weight;
            workgroupBarrier();

            let count = min(group_heads - first, 4u);
            for (var i = thread; i < count * quads; i += WORKGROUP) {
                let h = i / quads;
                let d = i % quads;
                var all = query[h * 128u + d];
                for (var s = 1u; s < shares; s++) {
                    all += query[h * 128u + s * quads + d];
                }
                let out = ((t * HEADS + kv_head * group_heads + first + h) * CHUNKS + chunk) * (quads + 1u);
                parts[out + d] = all;
                if (d == 0u) {
                    var total = weights[0][h];
                    for (var s = 1u; s < shares; s++) {
                        total += weights[s * quads][h];
                    }
                    parts[out + quads] = vec4<f32>(largest[h], total, 0.0, 0.0);
                }
            }
        }
    }
}
