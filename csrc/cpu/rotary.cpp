// Rotary embedding in place.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

// Channel i turns with channel i + half.
template <typename T>
static void rotate_halves(T* x, const float* cos, const float* sin, int64_t half) {
  const int64_t whole = half - half % Vec::kLanes;
  for (int64_t i = 0; i < whole; i += Vec::kLanes) {
    const Vec first = vec_load(x + i), second = vec_load(x + half + i);
    const Vec c = vec_load(cos + i), s = vec_load(sin + i);
    vec_store(x + i, first * c - second * s);
    vec_store(x + half + i, second * c + first * s);
  }
  for (int64_t i = whole; i < half; ++i) {
    const float first = to_float(x[i]), second = to_float(x[half + i]);
    from_float(first * cos[i] - second * sin[i], x + i);
    from_float(second * cos[i] + first * sin[i], x + half + i);
  }
}

// Channel 2i turns with channel 2i + 1.
template <typename T>
static void rotate_neighbours(T* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = to_float(x[2 * i]), second = to_float(x[2 * i + 1]);
    from_float(first * cos[i] - second * sin[i], x + 2 * i);
    from_float(second * cos[i] + first * sin[i], x + 2 * i + 1);
  }
}

void rotary(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2;
  with_type(a.dtype, [&](auto type) {
    using T = decltype(type);
    for (int64_t token = begin; token < end; ++token) {
      const float* cos = a.cos_sin + token * a.rotary_dim;
      for (int64_t head = 0; head < a.heads; ++head) {
        T* x = static_cast<T*>(a.x) + token * a.token_stride + head * a.head_stride;
        if (a.interleaved) {
          rotate_neighbours(x, cos, cos + half, half);
        } else {
          rotate_halves(x, cos, cos + half, half);
        }
      }
    }
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
