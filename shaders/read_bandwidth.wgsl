// read_bandwidth: reads a buffer once, as fast as the device can. For benchmarks; no program has this operation.
//
//   sums[g] = sum of all words of data that workgroup g reads, modulo 2^32; nothing of it can be left out
//
// data   vec4<u32> [N]        read
// sums   u32 [READERS]        write
//
// One workgroup an element of sums, READERS of them along x, at most 65535. A thread takes data number i,
// i + READERS * WORKGROUP, and so on; four loads are in flight. WORKGROUP is a multiple of 64, at most 256.

struct Params {
    n: u32,
}

override WORKGROUP: u32 = 256;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> data: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> sums: array<u32>;

var<workgroup> partial: array<u32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>,
        @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) thread: u32) {
    let stride = workgroups.x * WORKGROUP;
    var total = vec4<u32>(0u);
    var i = workgroup.x * WORKGROUP + thread;
    for (; i + 3u * stride < params.n; i += 4u * stride) {
        let first = data[i] + data[i + stride];
        let second = data[i + 2u * stride] + data[i + 3u * stride];
        total += first + second;
    }
    for (; i < params.n; i += stride) {
        total += data[i];
    }
    partial[thread] = total.x + total.y + total.z + total.w;
    workgroupBarrier();
    if (thread == 0u) {
        var sum = 0u;
        for (var other = 0u; other < WORKGROUP; other++) {
            sum += partial[other];
        }
        sums[workgroup.x] = sum;
    }
}
