// Copies of whole cache blocks inside device memory: a grid row per block, 16 bytes per thread and turn where the
// addresses allow it.
#include <cuda_runtime.h>

#include "kv_copy.h"

namespace {

constexpr int kThreads = 256;
// Grid columns per block: enough to fill a device with a few blocks, few enough to keep many blocks cheap.
constexpr int64_t kColumnsMax = 32;

template <typename Unit>
__global__ void copy_blocks_kernel(char* target, const char* source, const int64_t* target_blocks,
                                   const int64_t* source_blocks, int64_t units, int64_t target_stride,
                                   int64_t source_stride) {
  const int64_t pair = blockIdx.y;
  Unit* to = reinterpret_cast<Unit*>(target + target_blocks[pair] * target_stride);
  const Unit* from = reinterpret_cast<const Unit*>(source + source_blocks[pair] * source_stride);
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < units; i += step) to[i] = from[i];
}

template <typename Unit>
cudaError_t launch(char* target, const char* source, const int64_t* target_blocks, const int64_t* source_blocks,
                   int64_t count, int64_t bytes, int64_t target_stride, int64_t source_stride, cudaStream_t stream) {
  const int64_t units = bytes / int64_t(sizeof(Unit));
  const int64_t wanted = (units + kThreads - 1) / kThreads;
  const unsigned columns = unsigned(wanted < kColumnsMax ? wanted : kColumnsMax);
  // A grid has at most 65535 rows: more blocks than that go in several launches.
  for (int64_t start = 0; start < count; start += 65535) {
    const int64_t rows = count - start < 65535 ? count - start : 65535;
    copy_blocks_kernel<Unit><<<dim3(columns, unsigned(rows), 1), kThreads, 0, stream>>>(
        target, source, target_blocks + start, source_blocks + start, units, target_stride, source_stride);
  }
  return cudaGetLastError();
}

}  // namespace

extern "C" int vllm_cuda_copy_blocks(void* target, const void* source, const int64_t* target_blocks,
                                     const int64_t* source_blocks, int64_t count, int64_t block_bytes,
                                     int64_t target_stride_bytes, int64_t source_stride_bytes, void* stream) {
  if (count == 0 || block_bytes == 0) return 0;
  const uint64_t alignment = reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source) |
                             uint64_t(block_bytes) | uint64_t(target_stride_bytes) | uint64_t(source_stride_bytes);
  auto* to = static_cast<char*>(target);
  const auto* from = static_cast<const char*>(source);
  auto* s = static_cast<cudaStream_t>(stream);
  if (alignment % 16 == 0) {
    return launch<uint4>(to, from, target_blocks, source_blocks, count, block_bytes, target_stride_bytes,
                         source_stride_bytes, s);
  }
  if (alignment % 4 == 0) {
    return launch<uint32_t>(to, from, target_blocks, source_blocks, count, block_bytes, target_stride_bytes,
                            source_stride_bytes, s);
  }
  return launch<uint8_t>(to, from, target_blocks, source_blocks, count, block_bytes, target_stride_bytes,
                         source_stride_bytes, s);
}
