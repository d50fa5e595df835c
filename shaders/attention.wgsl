// attention: causal softmax attention of each token and query head over the cache, in one pass.
//
//   keys j = 0 .. p with p = position + t, where WINDOW is not 0 max(0, p - WINDOW + 1) .. p
//   kv head g = head / (heads / kv_heads)
//   s[j] = scale * sum over D of q[t, head, i] * k[j, g, i]
//   y[t, head, i] = sum over j of exp(s[j] - max s) * v[j, g, i] / sum over j of exp(s[j] - max s)
//   Keys come in runs of WORKGROUP; sums made so far are rescaled when a run raises the maximum.
//
// q        f32 [T, heads, D]            read
// k_cache  u32 [S, kv_heads, KV_WORDS]  read   KV 0 f32, 1 two f16 a word, 2 four int8 a word
// k_scale  f32 [S, kv_heads]            read   q8 only
// v_cache  u32 [S, kv_heads, KV_WORDS]  read
// v_scale  f32 [S, kv_heads]            read   q8 only
// y        f32 [T, heads, D]            write
//
// One workgroup a head (folded over x and y) and token (z). Scores: a thread takes one key. Values: a thread
// takes four dimensions and every (WORKGROUP / (D/4))-th key. D is a multiple of 4, at most 256 and at most
// 4 * WORKGROUP; WORKGROUP is a multiple of 4, at most 256.

const KV_F16: u32 = 1u;
const KV_Q8: u32 = 2u;
const LOWEST: f32 = -3.0e38;

struct Params {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    scale: f32,
}

override WORKGROUP: u32 = 64;
override KV: u32 = 1;
override WINDOW: u32 = 0;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: vec4<u32>;
@group(0) @binding(2) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> k_cache: array<u32>;
@group(0) @binding(4) var<storage, read> k_scale: array<f32>;
@group(0) @binding(5) var<storage, read> v_cache: array<u32>;
@group(0) @binding(6) var<storage, read> v_scale: array<f32>;
@group(0) @binding(7) var<storage, read_write> y: array<f32>;

var<workgroup> query: array<vec4<f32>, 64>;
// First the scores of the run, then exp(score - max).
var<workgroup> scores: array<f32, WORKGROUP>;
var<workgroup> partial: array<vec4<f32>, WORKGROUP>;

fn signed_bytes(word: u32) -> vec4<f32> {
    return vec4<f32>(vec4<i32>(bitcast<i32>(word << 24u), bitcast<i32>(word << 16u),
                               bitcast<i32>(word << 8u), bitcast<i32>(word)) >> vec4<u32>(24u));
}

// Words in four dimensions.
fn quad_words() -> u32 {
    return select(select(4u, 2u, KV == KV_F16), 1u, KV == KV_Q8);
}

// Four dimensions of a key, without the q8 scale. `at` is their first word.
fn four_of_key(at: u32) -> vec4<f32> {
    if (KV == KV_Q8) {
        return signed_bytes(k_cache[at]);
    } else if (KV == KV_F16) {
        return vec4<f32>(unpack2x16float(k_cache[at]), unpack2x16float(k_cache[at + 1u]));
    }
    return bitcast<vec4<f32>>(vec4<u32>(k_cache[at], k_cache[at + 1u], k_cache[at + 2u], k_cache[at + 3u]));
}

fn four_of_value(at: u32) -> vec4<f32> {
    if (KV == KV_Q8) {
        return signed_bytes(v_cache[at]);
    } else if (KV == KV_F16) {
        return vec4<f32>(unpack2x16float(v_cache[at]), unpack2x16float(v_cache[at + 1u]));
    }
    return bitcast<vec4<f32>>(vec4<u32>(v_cache[at], v_cache[at + 1u], v_cache[at + 2u], v_cache[at + 3u]));
}

// slot = key * kv_heads + kv head
fn score(slot: u32, quads: u32) -> f32 {
    var sum = 0.0;
    let first = slot * quads * quad_words();
    for (var i = 0u; i < quads; i++) {
        sum += dot(query[i], four_of_key(first + i * quad_words()));
    }
    if (KV == KV_Q8) {
        sum *= k_scale[slot];
    }
    return sum * params.scale;
}

// The first of `keys` keys that the last of them sees.
fn first_key(keys: u32) -> u32 {
    if (WINDOW == 0u) {
        return 0u;
    }
    return keys - min(keys, WINDOW);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let head = workgroup.x + workgroup.y * workgroups.x;
    if (head >= params.heads) {
        return;
    }
    let t = workgroup.z;
    let kv_head = head / (params.heads / params.kv_heads);
    let keys = step.x + t + 1u;
    let quads = params.head_dim / 4u;
    let row = (t * params.heads + head) * params.head_dim;

    // The threads split the keys of the value sum in `parts`; threads beyond the last part only score.
    let parts = WORKGROUP / quads;
    let part = thread / quads;
    let quad = thread % quads;

    if (thread < quads) {
        let i = row + thread * 4u;
        query[thread] = vec4<f32>(q[i], q[i + 1u], q[i + 2u], q[i + 3u]);
    }
    workgroupBarrier();

    var largest = LOWEST;
    var total = 0.0;
    var sum = vec4<f32>(0.0);
    for (var first = first_key(keys); first < keys; first += WORKGROUP) {
        let run = min(WORKGROUP, keys - first);
        var own = LOWEST;
        if (thread < run) {
            own = score((first + thread) * params.kv_heads + kv_head, quads);
        }
        scores[thread] = own;
        workgroupBarrier();
        let before = largest;
        for (var i = 0u; i < WORKGROUP; i++) {
            largest = max(largest, scores[i]);
        }
        workgroupBarrier();
        scores[thread] = select(0.0, exp(own - largest), thread < run);
        workgroupBarrier();
        let kept = exp(before - largest);
        total *= kept;
        sum *= kept;
        for (var i = 0u; i < run; i++) {
            total += scores[i];
        }
        if (part < parts) {
            for (var i = part; i < run; i += parts) {
                let slot = (first + i) * params.kv_heads + kv_head;
                var weight = scores[i];
                if (KV == KV_Q8) {
                    weight *= v_scale[slot];
                }
                sum += weight * four_of_value((slot * quads + quad) * quad_words());
            }
        }
        // The next run overwrites the scores.
        workgroupBarrier();
    }

    partial[thread] = sum;
    workgroupBarrier();
    if (thread < quads) {
        for (var i = 1u; i < parts; i++) {
            sum += partial[i * quads + thread];
        }
        let out = sum / total;
        let at = row + thread * 4u;
        y[at] = out.x;
        y[at + 1u] = out.y;
        y[at + 2u] = out.z;
        y[at + 3u] = out.w;
    }
}
