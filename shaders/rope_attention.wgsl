// rope_attention: rotary embedding, cache append and attention of up to eight tokens, split over the context: each
// workgroup takes CHUNK keys of one kv head and token for all query heads that share it. attention_merge joins the parts.
//
//   q, k normed (HEAD_NORM), rotated and k, v appended as in rope_append.wgsl (rows position .. position + T - 1)
//   keys j of chunk c: CHUNK c .. min(CHUNK (c + 1) - 1, P) with P = position + t
//   WINDOW not 0: of them those from P - WINDOW + 1 on
//   s[j] = scale * sum over D of q[t, h, i] * k[j, g, i],  m = max s,  p[j] = exp(s[j] - m)
//   parts[t, h, c] = (sum of p[j] v[j, g, i] for i < D,  m,  sum of p[j])
//
// x        f32 [T, (heads + 2*kv_heads) * D]      read        query, key, value heads
// rope     vec2<f32> [S, D/2]                     read        cos, sin
// gains    f32 [2, D]                             read        HEAD_NORM only: of queries, of keys
// k_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]    read_write  KV 0 f32, 1 two f16 a word, 2 four int8 a word
// k_scale  f32 [S, kv_heads]                      read_write  q8 only
// v_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]    read_write
// v_scale  f32 [S, kv_heads]                      read_write  q8 only
// parts    vec4<f32> [T, heads, CHUNKS, D/4 + 1]  read_write  chunks 0 .. (position + t) / CHUNK; m, sum in the last vec4
//
// A chunk whose keys a window hides all is not read. It has no part, for attention_merge reads none of those, but where
// P < 4 CHUNK: there the products that merge read every chunk, and its part has the weight zero.
//
// One workgroup a kv head (along x), chunk (y) and token (z); those beyond the token's last key end at once. The keys of
// the step are appended by every workgroup that reads them, all with the same bytes, and read there after a barrier. A
// part depends on its keys and its token alone, whatever T is. D is a multiple of 16, at most 256; at most eight query
// heads a kv head, with together at most 1024 dimensions. WORKGROUP is 256: WORKGROUP / CHUNK threads a key.

const KV_F16: u32 = 1u;
const KV_Q8: u32 = 2u;
const LOWEST: f32 = -3.0e38;

override WORKGROUP: u32 = 256;
const CHUNK: u32 = 64u;
override KV: u32 = 1;
override HEADS: u32 = 1;
override KV_HEADS: u32 = 1;
override HEAD_DIM: u32 = 64;
override CHUNKS: u32 = 1;
override SCALE: f32 = 1.0;
override HEAD_NORM: u32 = 0;
override EPS: f32 = 0.0;
override WINDOW: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read> gains: array<f32>;
@group(0) @binding(5) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> k_scale: array<f32>;
@group(0) @binding(7) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(8) var<storage, read_write> v_scale: array<f32>;
@group(0) @binding(9) var<storage, read_write> parts: array<vec4<f32>>;

// [query head of the group, D/4]
var<workgroup> query: array<vec4<f32>, 256>;
// Shares of a thread: of sums of squares, then of the scores of four heads, then of the mixed values of two heads at a
// time.
var<workgroup> shared_sums: array<vec4<f32>, 512>;
// Of each key, for four heads: the scores, and exp(score - max).
var<workgroup> scores: array<vec4<f32>, 64>;
var<workgroup> weights: array<vec4<f32>, 64>;
// First a key and a value head that are appended, as floats, q8 only; then the sums of exp(score - max) of the shares.
var<workgroup> fresh: array<vec4<f32>, 128>;

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

// Value i of a query or key head before the rotation. `gain`: where its gains begin.
fn head_value(first: u32, i: u32, factor: f32, gain: u32) -> f32 {
    if (HEAD_NORM == 1u) {
        return x[first + i] * factor * gains[gain + i];
    }
    return x[first + i];
}

// Value i of a query or key head, rotated. `gain`: where its gains begin.
fn rotated(first: u32, row: u32, i: u32, factor: f32, gain: u32) -> f32 {
    let half_dim = HEAD_DIM / 2u;
    if (i < half_dim) {
        let c = rope[row * half_dim + i];
        return head_value(first, i, factor, gain) * c.x - head_value(first, i + half_dim, factor, gain) * c.y;
    }
    let c = rope[row * half_dim + i - half_dim];
    return head_value(first, i, factor, gain) * c.x + head_value(first, i - half_dim, factor, gain) * c.y;
}

fn rotated_quad(first: u32, row: u32, quad: u32, factor: f32, gain: u32) -> vec4<f32> {
    let i = quad * 4u;
    return vec4<f32>(rotated(first, row, i, factor, gain), rotated(first, row, i + 1u, factor, gain),
                     rotated(first, row, i + 2u, factor, gain), rotated(first, row, i + 3u, factor, gain));
}

fn plain_quad(first: u32, quad: u32) -> vec4<f32> {
    let i = first + quad * 4u;
    return vec4<f32>(x[i], x[i + 1u], x[i + 2u], x[i + 3u]);
}

// Sums of squares of 16 values, a thread each: of the query heads of token t, then of the keys of the tokens 0 .. t.
fn share_squares(t: u32, kv_head: u32, thread: u32) {
    let group_heads = HEADS / KV_HEADS;
    let head = thread / (HEAD_DIM / 16u);
    if (head <= group_heads + t) {
        let is_query = head < group_heads;
        let token = select(head - group_heads, t, is_query);
        let own = select(HEADS + kv_head, kv_head * group_heads + head, is_query);
        let first = (token * (HEADS + 2u * KV_HEADS) + own) * HEAD_DIM;
        var sum = 0.0;
        for (var i = 0u; i < 4u; i++) {
            let v = plain_quad(first, 4u * (thread % (HEAD_DIM / 16u)) + i);
            sum += dot(v, v);
        }
        shared_sums[thread] = vec4<f32>(sum);
    }
}

// 1 / sqrt(mean(x^2) + eps) of a head, counted as in share_squares.
fn norm_factor(head: u32) -> f32 {
    let shares = HEAD_DIM / 16u;
    var sum = 0.0;
    for (var i = 0u; i < shares; i++) {
        sum += shared_sums[head * shares + i].x;
    }
    return inverseSqrt(sum / f32(HEAD_DIM) + EPS);
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

// vec4 `i` of a key (rotated) or value head of x that begins at `first`.
fn cache_vector(first: u32, row: u32, is_key: bool, i: u32, factor: f32) -> vec4<u32> {
    let at = i * vector_quads();
    if (KV == KV_F16) {
        return vec4<u32>(pack_halves(fresh_quad(first, row, is_key, at, factor)),
                         pack_halves(fresh_quad(first, row, is_key, at + 1u, factor)));
    }
    return bitcast<vec4<u32>>(fresh_quad(first, row, is_key, at, factor));
}

fn fresh_quad(first: u32, row: u32, is_key: bool, quad: u32, factor: f32) -> vec4<f32> {
    if (is_key) {
        return rotated_quad(first, row, quad, factor, HEAD_DIM);
    }
    return plain_quad(first, quad);
}

// Bits of the largest |value| of the head in `fresh` from `first` on, where NaN is above infinity.
fn largest_bits(first: u32) -> u32 {
    var all = 0u;
    for (var i = 0u; i < HEAD_DIM / 4u; i++) {
        let bits = bitcast<vec4<u32>>(fresh[first + i]) & vec4<u32>(0x7fffffffu);
        all = max(all, max(max(bits.x, bits.y), max(bits.z, bits.w)));
    }
    return all;
}

// Vec4 `i` of the head in `fresh` from `first` on, as integers; its scale is written too.
fn quantized_vector(first: u32, slot: u32, is_key: bool, i: u32) -> vec4<u32> {
    let bits = largest_bits(first);
    let largest = bitcast<f32>(bits);
    var to_integer = 0.0;
    var scale = 0.0;
    if (bits != 0u) {
        to_integer = 127.0 / largest;
        // An infinity or NaN stays in the scale, so that it cannot get lost.
        scale = select(largest / 127.0, largest, bits >= 0x7f800000u);
    }
    if (i == 0u) {
        if (is_key) {
            k_scale[slot] = scale;
        } else {
            v_scale[slot] = scale;
        }
    }
    let at = first + 4u * i;
    return vec4<u32>(pack_quad(fresh[at], to_integer), pack_quad(fresh[at + 1u], to_integer),
                     pack_quad(fresh[at + 2u], to_integer), pack_quad(fresh[at + 3u], to_integer));
}

// Append the key and the value of token t: the first half of the threads the key, the others the value.
fn append(t: u32, row: u32, kv_head: u32, thread: u32) {
    let is_key = thread < WORKGROUP / 2u;
    let own = thread % (WORKGROUP / 2u);
    let head = HEADS + kv_head + select(KV_HEADS, 0u, is_key);
    let first = (t * (HEADS + 2u * KV_HEADS) + head) * HEAD_DIM;
    let slot = row * KV_HEADS + kv_head;
    let vectors = row_vectors();
    var factor = 1.0;
    if (HEAD_NORM == 1u) {
        factor = norm_factor(HEADS / KV_HEADS + t);
    }
    if (KV == KV_Q8) {
        let quads = HEAD_DIM / 4u;
        let place = select(quads, 0u, is_key);
        workgroupBarrier();
        if (own < quads) {
            fresh[place + own] = fresh_quad(first, row, is_key, own, factor);
        }
        workgroupBarrier();
        if (own < vectors) {
            let packed = quantized_vector(place, slot, is_key, own);
            if (is_key) {
                k_cache[slot * vectors + own] = packed;
            } else {
                v_cache[slot * vectors + own] = packed;
            }
        }
    } else if (own < vectors) {
        let packed = cache_vector(first, row, is_key, own, factor);
        if (is_key) {
            k_cache[slot * vectors + own] = packed;
        } else {
            v_cache[slot * vectors + own] = packed;
        }
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

// Four vec4s of a row of a cache.
struct Four {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
}

// Those that a thread of a key takes: every LANES-th from `i` on, in place of those beyond the last that one.
fn load_key(slot: u32, i: u32) -> Four {
    let lanes = WORKGROUP / CHUNK;
    let at = slot * row_vectors();
    let all = min(vec4<u32>(i) + vec4<u32>(0u, 1u, 2u, 3u) * lanes, vec4<u32>(row_vectors() - 1u)) + at;
    return Four(k_cache[all.x], k_cache[all.y], k_cache[all.z], k_cache[all.w]);
}

// Adds what they give with four queries, which begin at `heads`.
fn add_key(old: vec4<f32>, v: Four, heads: vec4<u32>, i: u32) -> vec4<f32> {
    let lanes = WORKGROUP / CHUNK;
    let vectors = row_vectors();
    var sums = old;
    if (i < vectors) {
        sums += key_dots(v.a, heads, i);
    }
    if (i + lanes < vectors) {
        sums += key_dots(v.b, heads, i + lanes);
    }
    if (i + 2u * lanes < vectors) {
        sums += key_dots(v.c, heads, i + 2u * lanes);
    }
    if (i + 3u * lanes < vectors) {
        sums += key_dots(v.d, heads, i + 3u * lanes);
    }
    return sums;
}

// The bits of a quad of a value, in its first components.
fn load_value(slot: u32, quad: u32) -> vec4<u32> {
    let at = slot * row_vectors() + quad / vector_quads();
    if (KV == KV_Q8) {
        return vec4<u32>(v_cache[at][quad & 3u], bitcast<u32>(v_scale[slot]), 0u, 0u);
    } else if (KV == KV_F16) {
        let v = v_cache[at];
        return vec4<u32>(select(v.xy, v.zw, (quad & 1u) == 1u), 0u, 0u);
    }
    return v_cache[at];
}

fn value_quad(bits: vec4<u32>) -> vec4<f32> {
    let own = quad_of(bits, 0u);
    if (KV == KV_Q8) {
        return own * bitcast<f32>(bits.y);
    }
    return own;
}

// Eight loaded values, of the keys first, first + shares and so on.
struct Values {
    a: vec4<u32>,
    b: vec4<u32>,
    c: vec4<u32>,
    d: vec4<u32>,
    e: vec4<u32>,
    f: vec4<u32>,
    g: vec4<u32>,
    h: vec4<u32>,
}

// Of keys beyond the last that one.
fn load_values(start: u32, kv_head: u32, first: u32, shares: u32, keys: u32, quad: u32) -> Values {
    let near = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u) * shares;
    let far = near + 4u * shares;
    let s = (start + min(near, vec4<u32>(keys - 1u))) * KV_HEADS + kv_head;
    let t = (start + min(far, vec4<u32>(keys - 1u))) * KV_HEADS + kv_head;
    return Values(load_value(s.x, quad), load_value(s.y, quad), load_value(s.z, quad), load_value(s.w, quad),
                  load_value(t.x, quad), load_value(t.y, quad), load_value(t.z, quad), load_value(t.w, quad));
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
fn mix(old: Mixed, bits: vec4<u32>, key: u32, keys: u32) -> Mixed {
    let v = value_quad(bits);
    let p = select(vec4<f32>(0.0), weights[min(key, CHUNK - 1u)], key < keys);
    return Mixed(fma(vec4<f32>(p.x), v, old.h0), fma(vec4<f32>(p.y), v, old.h1),
                 fma(vec4<f32>(p.z), v, old.h2), fma(vec4<f32>(p.w), v, old.h3), old.weight + p);
}

fn mix_values(old: Mixed, v: Values, first: u32, shares: u32, keys: u32) -> Mixed {
    var m = mix(old, v.a, first, keys);
    m = mix(m, v.b, first + shares, keys);
    m = mix(m, v.c, first + 2u * shares, keys);
    m = mix(m, v.d, first + 3u * shares, keys);
    m = mix(m, v.e, first + 4u * shares, keys);
    m = mix(m, v.f, first + 5u * shares, keys);
    m = mix(m, v.g, first + 6u * shares, keys);
    return mix(m, v.h, first + 7u * shares, keys);
}

// The score of a key from the shares of its threads.
fn score_of(key: u32, slot: u32) -> vec4<f32> {
    let lanes = WORKGROUP / CHUNK;
    var sum = shared_sums[key * lanes];
    for (var i = 1u; i < lanes; i++) {
        sum += shared_sums[key * lanes + i];
    }
    if (KV == KV_Q8) {
        return sum * (SCALE * k_scale[slot]);
    }
    return sum * SCALE;
}

fn largest_score() -> vec4<f32> {
    // Four chains, which overlap.
    var a = scores[0];
    var b = scores[1];
    var c = scores[2];
    var d = scores[3];
    for (var i = 4u; i < CHUNK; i += 4u) {
        a = max(a, scores[i]);
        b = max(b, scores[i + 1u]);
        c = max(c, scores[i + 2u]);
        d = max(d, scores[i + 3u]);
    }
    return max(max(a, b), max(c, d));
}

fn load_queries(t: u32, row: u32, kv_head: u32, thread: u32) {
    let group_heads = HEADS / KV_HEADS;
    let quads = HEAD_DIM / 4u;
    for (var i = thread; i < group_heads * quads; i += WORKGROUP) {
        let head = kv_head * group_heads + i / quads;
        var factor = 1.0;
        if (HEAD_NORM == 1u) {
            factor = norm_factor(i / quads);
        }
        query[i] = rotated_quad((t * (HEADS + 2u * KV_HEADS) + head) * HEAD_DIM, row, i % quads, factor, 0u);
    }
}

// Adds the shares of the mixed values of heads h and h + 1 of `count`, and writes them to the parts from `part` on.
fn write_parts(a: vec4<f32>, b: vec4<f32>, h: u32, part: u32, count: u32, thread: u32) {
    let quads = HEAD_DIM / 4u;
    let shares = WORKGROUP / quads;
    shared_sums[thread] = a;
    shared_sums[256u + thread] = b;
    workgroupBarrier();
    let own = h + thread / quads;
    if (thread < 2u * quads && own < count) {
        let first = 256u * (thread / quads) + thread % quads;
        var all = shared_sums[first];
        for (var s = 1u; s < shares; s++) {
            all += shared_sums[first + s * quads];
        }
        parts[part + own * CHUNKS * (quads + 1u) + thread % quads] = all;
    }
}

// The first of `keys` keys that the last of them sees.
fn first_key(keys: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return keys - min(keys, WINDOW);
}

// The part of a chunk of which the token sees no key, for all heads of the group.
fn write_nothing(t: u32, kv_head: u32, chunk: u32, thread: u32) {
    let group_heads = HEADS / KV_HEADS;
    let vectors = HEAD_DIM / 4u + 1u;
    for (var i = thread; i < group_heads * vectors; i += WORKGROUP) {
        let part = ((t * HEADS + kv_head * group_heads + i / vectors) * CHUNKS + chunk) * vectors;
        parts[part + i % vectors] = vec4<f32>(select(0.0, LOWEST, i % vectors == vectors - 1u), 0.0, 0.0, 0.0);
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let kv_head = workgroup.x;
    let chunk = workgroup.y;
    let t = workgroup.z;
    let position = step.x;
    let row = position + t;
    if (chunk * CHUNK > row) {
        return;
    }
    let end = min((chunk + 1u) * CHUNK, row + 1u);
    let start = max(chunk * CHUNK, first_key(row + 1u));
    if (WINDOW != 0u && start >= end) {
        if (row < 4u * CHUNK) {
            write_nothing(t, kv_head, chunk, thread);
        }
        return;
    }
    let keys = end - start;
    let group_heads = HEADS / KV_HEADS;
    let quads = HEAD_DIM / 4u;
    let lanes = WORKGROUP / CHUNK;
    let shares = WORKGROUP / quads;
    let share = thread / quads;
    let quad = thread % quads;
    let lane = thread % lanes;
    let key = start + min(thread / lanes, keys - 1u);
    let slot = key * KV_HEADS + kv_head;

    // Old keys are on their way while the new ones are made. A thread beyond the last key takes that one, and its score
    // counts for nothing.
    var k = load_key(slot, lane);
    if (HEAD_NORM == 1u) {
        share_squares(t, kv_head, thread);
        workgroupBarrier();
    }
    load_queries(t, row, kv_head, thread);
    for (var i = 0u; i <= t; i++) {
        if ((position + i) / CHUNK == chunk) {
            append(i, position + i, kv_head, thread);
        }
    }
    storageBarrier();
    workgroupBarrier();
    if (key >= position) {
        k = load_key(slot, lane);
    }

    for (var first = 0u; first < group_heads; first += 4u) {
        if (first > 0u) {
            k = load_key(slot, lane);
        }
        let v = load_values(start, kv_head, share, shares, keys, quad);
        // The last head may repeat.
        let heads = min(vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(group_heads - 1u)) * quads;
        var own = add_key(vec4<f32>(0.0), k, heads, lane);
        for (var i = lane + 4u * lanes; i < row_vectors(); i += 4u * lanes) {
            own = add_key(own, load_key(slot, i), heads, i);
        }
        shared_sums[thread] = own;
        workgroupBarrier();
        var score = vec4<f32>(LOWEST);
        if (thread < CHUNK) {
            if (thread < keys) {
                score = score_of(thread, (start + thread) * KV_HEADS + kv_head);
            }
            scores[thread] = score;
        }
        workgroupBarrier();
        let largest = largest_score();
        if (thread < CHUNK) {
            weights[thread] = select(vec4<f32>(0.0), exp(score - largest), thread < keys);
        }
        workgroupBarrier();

        // A thread takes a quad of dimensions of every `shares`-th key, eight loads in flight.
        var mixed = Mixed();
        if (share < shares) {
            mixed = mix_values(mixed, v, share, shares, keys);
            for (var j = share + 8u * shares; j < keys; j += 8u * shares) {
                mixed = mix_values(mixed, load_values(start, kv_head, j, shares, keys, quad), j, shares, keys);
            }
        }
        let part = ((t * HEADS + kv_head * group_heads + first) * CHUNKS + chunk) * (quads + 1u);
        let count = min(group_heads - first, 4u);
        if (quad == 0u && share < shares) {
            fresh[share] = mixed.weight;
        }
        write_parts(mixed.h0, mixed.h1, 0u, part, count, thread);
        if (count > 2u) {
            workgroupBarrier();
            write_parts(mixed.h2, mixed.h3, 2u, part, count, thread);
        }
        if (thread < count) {
            var total = fresh[0][thread];
            for (var s = 1u; s < shares; s++) {
                total += fresh[s][thread];
            }
            parts[part + thread * CHUNKS * (quads + 1u) + quads] = vec4<f32>(largest[thread], total, 0.0, 0.0);
        }
        workgroupBarrier();
    }
}
