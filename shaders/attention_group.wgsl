// attention_group: causal softmax attention of each token over the cache, for all query heads that share a kv head.
//
//   keys j = 0 .. p with p = position + t, where WINDOW is not 0 max(0, p - WINDOW + 1) .. p; in runs of 128
//   kv head g = head / (heads / kv_heads)
//   s[j] = scale * sum over D of q[t, head, i] * k[j, g, i]
//   y[t, head, i] = sum over j of exp(s[j] - max s) * v[j, g, i] / sum over j of exp(s[j] - max s)
//   Sums made so far are rescaled when a run raises the maximum.
//
// q        vec4<f32> [T, heads, D/4]             read
// k_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]   read   KV 0 f32, 1 two f16 a word, 2 four int8 a word
// k_scale  f32 [S, kv_heads]                     read   q8 only
// v_cache  vec4<u32> [S, kv_heads, KV_WORDS/4]   read
// v_scale  f32 [S, kv_heads]                     read   q8 only
// y        vec4<f32> [T, heads, D/4]             write
//
// One workgroup a kv head (along x) and token (z), four query heads at a time. Scores: a thread a key. Values: a thread
// a quad of dimensions of every (128 / (D/4))-th key. D is a multiple of 16, at most 256; the query heads of a kv head
// have at most 1024 dimensions. WORKGROUP is 128.

const KV_F16: u32 = 1u;
const KV_Q8: u32 = 2u;
const LOWEST: f32 = -3.0e38;

override WORKGROUP: u32 = 128;
override KV: u32 = 1;
override HEADS: u32 = 1;
override KV_HEADS: u32 = 1;
override HEAD_DIM: u32 = 64;
override SCALE: f32 = 1.0;
override WINDOW: u32 = 0;

@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> k_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> k_scale: array<f32>;
@group(0) @binding(5) var<storage, read> v_cache: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> v_scale: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<vec4<f32>>;

// [query head of the group, D/4]
var<workgroup> query: array<vec4<f32>, 256>;
// At the end, the shares of the mixed values of two heads.
var<workgroup> joined: array<vec4<f32>, 256>;
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

// The first of `keys` keys that the last of them sees.
fn first_key(keys: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return keys - min(keys, WINDOW);
}

// Adds the shares of two heads and writes them; `two` is 1 or 2, `first` the first of them.
fn join(h0: vec4<f32>, h1: vec4<f32>, first: u32, part: u32, two: u32, out: u32, thread: u32) {
    let quads = HEAD_DIM / 4u;
    let shares = WORKGROUP / quads;
    workgroupBarrier();
    joined[thread] = h0;
    joined[128u + thread] = h1;
    workgroupBarrier();
    for (var i = thread; i < two * quads; i += WORKGROUP) {
        let h = i / quads;
        let d = i % quads;
        var all = joined[h * 128u + d];
        var total = weights[0][part + h];
        for (var s = 1u; s < shares; s++) {
            all += joined[h * 128u + s * quads + d];
            total += weights[s * quads][part + h];
        }
        y[out + (first + h) * quads + d] = all / total;
    }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let kv_head = workgroup.x;
    let t = workgroup.z;
    let keys = step.x + t + 1u;
    let group_heads = HEADS / KV_HEADS;
    let quads = HEAD_DIM / 4u;
    let shares = WORKGROUP / quads;
    let share = thread / quads;
    let quad = thread % quads;
    let row = (t * HEADS + kv_head * group_heads) * quads;

    for (var i = thread; i < group_heads * quads; i += WORKGROUP) {
        query[i] = q[row + i];
    }
    workgroupBarrier();
    for (var first = 0u; first < group_heads; first += 4u) {
        var mixed = Mixed();
        var largest = vec4<f32>(LOWEST);
        for (var start = first_key(keys); start < keys; start += 128u) {
            let run = min(128u, keys - start);
            // A thread beyond the last key scores that one, and its score counts for nothing.
            let key = start + min(thread, run - 1u);
            let own = select(vec4<f32>(LOWEST), score(key * KV_HEADS + kv_head, first), thread < run);
            let before = largest;
            largest = max(before, largest_score(thread, own));
            scores[thread] = select(vec4<f32>(0.0), exp(own - largest), thread < run);
            workgroupBarrier();
            let kept = exp(before - largest);
            mixed = Mixed(mixed.h0 * kept.x, mixed.h1 * kept.y, mixed.h2 * kept.z, mixed.h3 * kept.w,
                          mixed.weight * kept);
            if (share < shares) {
                // Four loads in flight; keys beyond the last have the weight zero.
                for (var j = share; j < run; j += 4u * shares) {
                    let at = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u) * shares;
                    let slots = (start + min(at, vec4<u32>(run - 1u))) * KV_HEADS + kv_head;
                    let v0 = value_of(slots.x, quad);
                    let v1 = value_of(slots.y, quad);
                    let v2 = value_of(slots.z, quad);
                    let v3 = value_of(slots.w, quad);
                    mixed = mix(mixed, v0, at.x, true);
                    mixed = mix(mixed, v1, min(at.y, 127u), at.y < run);
                    mixed = mix(mixed, v2, min(at.z, 127u), at.z < run);
                    mixed = mix(mixed, v3, min(at.w, 127u), at.w < run);
                }
            }
            // The next run overwrites the scores.
            workgroupBarrier();
        }
        weights[thread] = mixed.weight;
        let left = group_heads - first;
        join(mixed.h0, mixed.h1, first, 0u, min(left, 2u), row, thread);
        if (left > 2u) {
            join(mixed.h2, mixed.h3, first + 2u, 2u, min(left - 2u, 2u), row, thread);
        }
    }
}
