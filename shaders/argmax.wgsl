// argmax: the greedy choice of each row among `part` logits; accept.wgsl joins the parts.
//
//   l[r, i] = seen ? (logit > 0 ? logit * inv_penalty : logit * penalty) : logit
//   picks[r, part] = key(l) of the greatest l and its i; ties to the lowest i
//   A token was seen if its bit in seen is set, or if it is one of the drafts ids[1 .. r].
//
// logits    f32 [R, V]                    read
// sampling  u32 [8]                       read   word 4 penalty, word 5 1 / penalty (f32 bits)
// ids       u32 [R]                       read
// seen      u32 [ceil(V/32)]              read   bit i % 32 of word i / 32
// picks     u32 [R, PARTS, 2]             write  key, id
//
// One workgroup a part (along x; PARTS = ceil(V / part)) and row (z). WORKGROUP is a multiple of 16, at most 256.

const INVALID: u32 = 0xffffffffu;

struct Params {
    vocabulary: u32,
    part: u32,
    parts: u32,
}

override WORKGROUP: u32 = 256;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> sampling: array<u32>;
@group(0) @binding(4) var<storage, read> ids: array<u32>;
@group(0) @binding(5) var<storage, read> seen: array<u32>;
@group(0) @binding(6) var<storage, read_write> picks: array<u32>;

var<workgroup> best_keys: array<u32, WORKGROUP>;
var<workgroup> best_ids: array<u32, WORKGROUP>;

fn was_seen(row: u32, i: u32) -> bool {
    var found = (seen[i >> 5u] & (1u << (i & 31u))) != 0u;
    for (var draft = 1u; draft <= row; draft++) {
        found = found || ids[draft] == i;
    }
    return found;
}

fn penalized(row: u32, i: u32) -> f32 {
    let l = logits[row * params.vocabulary + i];
    if (was_seen(row, i)) {
        return l * select(bitcast<f32>(sampling[4]), bitcast<f32>(sampling[5]), l > 0.0);
    }
    return l;
}

// Unsigned integers in the order of the floats; both zeros alike, NaN above all.
fn key(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0xffffffffu;
    }
    if (bits == 0x80000000u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let part = workgroup.x;
    let row = workgroup.z;
    var best_key = 0u;
    var best_id = INVALID;
    for (var i = part * params.part + thread; i < min((part + 1u) * params.part, params.vocabulary); i += WORKGROUP) {
        let k = key(penalized(row, i));
        if (k > best_key) {
            best_key = k;
            best_id = i;
        }
    }
    best_keys[thread] = best_key;
    best_ids[thread] = best_id;
    workgroupBarrier();
    if (thread < 16u) {
        for (var i = thread + 16u; i < WORKGROUP; i += 16u) {
            if (best_keys[i] > best_key || (best_keys[i] == best_key && best_ids[i] < best_id)) {
                best_key = best_keys[i];
                best_id = best_ids[i];
            }
        }
        best_keys[thread] = best_key;
        best_ids[thread] = best_id;
    }
    workgroupBarrier();
    if (thread == 0u) {
        for (var i = 1u; i < 16u; i++) {
            if (best_keys[i] > best_key || (best_keys[i] == best_key && best_ids[i] < best_id)) {
                best_key = best_keys[i];
                best_id = best_ids[i];
            }
        }
        let at = 2u * (row * params.parts + part);
        picks[at] = best_key;
        picks[at + 1u] = best_id;
    }
}
