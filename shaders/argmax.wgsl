// argmax: the greedy next token, and the bookkeeping of one decode step.
//
//   l[i] = seen[i] ? (logit[i] > 0 ? logit[i] * inv_penalty : logit[i] * penalty) : logit[i]
//   id   = the lowest i with the greatest l[i]; 4294967295 where that is infinite or any l is NaN
//   ids[0] = id, ring[produced % ring_size] = id, bit id of seen = 1,
//   step = (position + tokens, 1, 1, produced + 1)
//
// logits    f32 [R, V]          read        row R - 1 is used
// sampling  u32 [8]             read        word 4 penalty, word 5 1 / penalty (f32 bits)
// step      u32 [4]             read_write  position, tokens T, rows R, produced
// ids       u32 [1]             read_write
// ring      u32 [RING]          read_write
// seen      u32 [ceil(V/32)]    read_write  bit i % 32 of word i / 32
//
// One workgroup. WORKGROUP is a multiple of 16, at most 256.

const INVALID: u32 = 0xffffffffu;
// key() of minus infinity and of infinity; finite numbers lie between, NaN above.
const LOWEST_KEY: u32 = 0x007fffffu;
const HIGHEST_KEY: u32 = 0xff800000u;

struct Params {
    vocabulary: u32,
    ring_size: u32,
}

override WORKGROUP: u32 = 256;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> sampling: array<u32>;
@group(0) @binding(4) var<storage, read_write> step: array<u32>;
@group(0) @binding(5) var<storage, read_write> ids: array<u32>;
@group(0) @binding(6) var<storage, read_write> ring: array<u32>;
@group(0) @binding(7) var<storage, read_write> seen: array<u32>;

var<workgroup> best_keys: array<u32, WORKGROUP>;
var<workgroup> best_ids: array<u32, WORKGROUP>;

fn penalized(row: u32, i: u32) -> f32 {
    let l = logits[row + i];
    if ((seen[i >> 5u] & (1u << (i & 31u))) == 0u) {
        return l;
    }
    return l * select(bitcast<f32>(sampling[4]), bitcast<f32>(sampling[5]), l > 0.0);
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
fn main(@builtin(local_invocation_index) thread: u32) {
    let row = (step[2] - 1u) * params.vocabulary;
    var best_key = 0u;
    var best_id = INVALID;
    for (var i = thread; i < params.vocabulary; i += WORKGROUP) {
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
        if (best_key <= LOWEST_KEY || best_key >= HIGHEST_KEY) {
            best_id = INVALID;
        } else {
            seen[best_id >> 5u] |= 1u << (best_id & 31u);
        }
        ids[0] = best_id;
        ring[step[3] % params.ring_size] = best_id;
        step[0] += step[1];
        step[1] = 1u;
        step[2] = 1u;
        step[3] += 1u;
    }
}
