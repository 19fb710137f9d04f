// SHA-256 of short messages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv_core {

constexpr size_t kDigestBytes = 32;

// The padding is written behind the message: `data` has room for 72 bytes more than `size`.
void sha256(uint8_t* data, size_t size, uint8_t digest[kDigestBytes]);

// Keeps to portable code, for tests; false goes back to what the processor has.
void use_portable_sha256(bool portable);

}  // namespace kv_core
