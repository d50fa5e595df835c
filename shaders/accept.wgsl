// accept: joins the picks of each row, takes drafts as long as they are what was picked, and does the bookkeeping of a
// step. In a step without drafts R is 1, and one id is taken.
//
//   id[r] = the pick of the greatest key, ties to the lowest id; 4294967295 where that key is of an infinity or a NaN
//   taken = the largest n <= R with id[r] = ids[r + 1] and valid for all r < n - 1
//   ring[(produced + r) % ring_size] = id[r], bit id[r] of seen = 1 for r < taken
//   ids[0] = id[taken - 1], step = (position + T - R + taken, 1, 1, produced + taken)
//
// picks  u32 [R, PARTS, 2]     read        key, id
// step   u32 [4]               read_write  position, tokens T, rows R, produced
// ids    u32 [R]               read_write  the token before the first row, then the drafts
// ring   u32 [RING]            read_write
// seen   u32 [ceil(V/32)]      read_write  bit i % 32 of word i / 32
//
// One workgroup; a thread a part, then one alone. WORKGROUP is a multiple of 16, at most 256.

const INVALID: u32 = 0xffffffffu;
// key() of minus infinity and of infinity; finite numbers lie between, NaN above.
const LOWEST_KEY: u32 = 0x007fffffu;
const HIGHEST_KEY: u32 = 0xff800000u;

struct Params {
    parts: u32,
    ring_size: u32,
}

override WORKGROUP: u32 = 32;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> picks: array<u32>;
@group(0) @binding(3) var<storage, read_write> step: array<u32>;
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> ring: array<u32>;
@group(0) @binding(6) var<storage, read_write> seen: array<u32>;

var<workgroup> best_keys: array<u32, WORKGROUP>;
var<workgroup> best_ids: array<u32, WORKGROUP>;
var<workgroup> row_count: u32;

// Thread 0 gets the row's id.
fn pick(row: u32, thread: u32) -> u32 {
    var best_key = 0u;
    var best_id = INVALID;
    for (var part = thread; part < params.parts; part += WORKGROUP) {
        let at = 2u * (row * params.parts + part);
        if (picks[at] > best_key || (picks[at] == best_key && picks[at + 1u] < best_id)) {
            best_key = picks[at];
            best_id = picks[at + 1u];
        }
    }
    workgroupBarrier();
    best_keys[thread] = best_key;
    best_ids[thread] = best_id;
    workgroupBarrier();
    if (thread == 0u) {
        for (var i = 1u; i < min(WORKGROUP, params.parts); i++) {
            if (best_keys[i] > best_key || (best_keys[i] == best_key && best_ids[i] < best_id)) {
                best_key = best_keys[i];
                best_id = best_ids[i];
            }
        }
        if (best_key <= LOWEST_KEY || best_key >= HIGHEST_KEY) {
            best_id = INVALID;
        }
    }
    return best_id;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) thread: u32) {
    // Read from a buffer that is written, so not uniform by itself.
    if (thread == 0u) {
        row_count = step[2];
    }
    let rows = workgroupUniformLoad(&row_count);
    var taken = 0u;
    var open = true;
    for (var row = 0u; row < rows; row++) {
        let id = pick(row, thread);
        if (thread == 0u && open) {
            ring[(step[3] + taken) % params.ring_size] = id;
            if (id != INVALID) {
                seen[id >> 5u] |= 1u << (id & 31u);
            }
            taken++;
            open = row + 1u < rows && id != INVALID && ids[row + 1u] == id;
            if (!open) {
                ids[0] = id;
            }
        }
    }
    if (thread == 0u) {
        step[0] += step[1] - step[2] + taken;
        step[1] = 1u;
        step[2] = 1u;
        step[3] += taken;
    }
}
