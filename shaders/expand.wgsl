// expand: base-3 ternary rows as they lie in a pack -> the 2-bit layout the products read.
//
//   byte of five trits b = ceil(v * 256 / 243); digit n = (((b * 3^n) & 255) * 3) >> 8, first digit first
//   codes[row, element / 16] bits 8*(e % 4) + 2*(e / 4) = digit of the element, e = element % 16
//   elements at or beyond K: code 1 (trit 0)
//
// packed  u32 [N, ceil(K/20)]      read   four bytes a word, little-endian
// codes   u32 [N, ceil(K/64), 4]   write
//
// One workgroup a row, folded over x and y. Needs no limit above WebGPU's defaults.

struct Params {
    n: u32,
    disk_words: u32,
    blocks: u32,
    k: u32,
}

override WORKGROUP: u32 = 64;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> packed: array<u32>;
@group(0) @binding(3) var<storage, read_write> codes: array<u32>;

fn packed_byte(row: u32, index: u32) -> u32 {
    return (packed[row * params.disk_words + (index >> 2u)] >> (8u * (index & 3u))) & 255u;
}

// The 16 codes from `first` on.
fn codes_of(row: u32, first: u32) -> u32 {
    var word = 0u;
    var index = first / 5u;
    var rest = 0u;
    if (first < params.k) {
        // rest = (byte * 3^n) & 255; n = first % 5 digits of the first byte belong to the word before.
        rest = packed_byte(row, index);
        for (var n = first % 5u; n > 0u; n--) {
            rest = (rest * 3u) & 255u;
        }
    }
    var digit_in_byte = first % 5u;
    for (var e = 0u; e < 16u; e++) {
        var code = 1u;
        if (first + e < params.k) {
            if (digit_in_byte == 5u) {
                digit_in_byte = 0u;
                index++;
                rest = packed_byte(row, index);
            }
            code = (rest * 3u) >> 8u;
            rest = (rest * 3u) & 255u;
            digit_in_byte++;
        }
        word |= code << (8u * (e & 3u) + 2u * (e >> 2u));
    }
    return word;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let row = workgroup.x + workgroup.y * workgroups.x;
    if (row >= params.n) {
        return;
    }
    let words = params.blocks * 4u;
    for (var i = thread; i < words; i += WORKGROUP) {
        codes[row * words + i] = codes_of(row, i * 16u);
    }
}
