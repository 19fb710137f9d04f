// Moves of cache rows and blocks: bytes only.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

void write_kv(const WriteKvArgs& a, int64_t begin, int64_t end) {
  const size_t key_bytes = size_t(a.key_dim * a.item_size);
  const size_t value_bytes = size_t(a.value_dim * a.item_size);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = a.slots[token];
    if (slot < a.block_size) continue;  // nothing to write, or the null block
    const int64_t block = slot / a.block_size;
    char* row = a.pages + block * a.block_stride_bytes + (slot - block * a.block_size) * a.row_stride_bytes;
    const char* key = a.key + token * a.key_token_stride_bytes;
    const char* value = a.value + token * a.value_token_stride_bytes;
    for (int64_t head = 0; head < a.heads; ++head) {
      std::memcpy(row, key + head * a.key_head_stride_bytes, key_bytes);
      std::memcpy(row + key_bytes, value + head * a.value_head_stride_bytes, value_bytes);
      row += a.head_stride_bytes;
    }
  }
}

void copy_rows(const CopyRowsArgs& a, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    if (a.target_rows[i] < 0) continue;
    const int64_t source = a.source_rows != nullptr ? a.source_rows[i] : i;
    std::memcpy(a.target + a.target_rows[i] * a.target_stride_bytes, a.source + source * a.source_stride_bytes,
                size_t(a.row_bytes));
  }
}

void to_float_array(DType dtype, const void* in, float* out, int64_t count) {
  with_type(dtype, [&](auto type) {
    const auto* x = static_cast<const decltype(type)*>(in);
    const int64_t whole = count - count % Vec::kLanes;
    for (int64_t i = 0; i < whole; i += Vec::kLanes) vec_store(out + i, vec_load(x + i));
    for (int64_t i = whole; i < count; ++i) out[i] = to_float(x[i]);
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
