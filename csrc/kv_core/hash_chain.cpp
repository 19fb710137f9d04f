// The chain of block hashes without extra keys: SHA-256 over `(parent, tokens, None)`, pickled or in canonical CBOR.
#include "records.h"
#include "sha256.h"

#include <cstring>
#include <vector>

namespace kv_core {

namespace {

constexpr Py_ssize_t kBlockTokensMax = 8192;  // beyond, pickle may split its frame
constexpr size_t kTokenBytesMax = 5;
constexpr size_t kOverheadBytes = 512;        // parent, marks and padding

uint8_t* put(uint8_t* out, uint64_t value, int bytes, bool big_endian) {
  for (int i = 0; i < bytes; ++i) out[i] = uint8_t(value >> 8 * (big_endian ? bytes - 1 - i : i));
  return out + bytes;
}

// Protocol 5 as pickle writes it: a frame of the parent, the tuple of tokens, None, and the tuple of the three.
class Pickle {
 public:
  static uint8_t* head(uint8_t* out, const uint8_t* parent, size_t size, Py_ssize_t num_tokens) {
    std::memcpy(out, "\x80\x05\x95", 3);
    out = put(out + 11, 'C', 1, false);  // the frame's length is filled in at the end
    out = put(out, size, 1, false);
    std::memcpy(out, parent, size);
    out = put(out + size, 0x94, 1, false);
    return num_tokens > 3 ? put(out, '(', 1, false) : out;
  }
  static uint8_t* token(uint8_t* out, uint32_t token) {
    if (token < 0x100) return put(put(out, 'K', 1, false), token, 1, false);
    if (token < 0x10000) return put(put(out, 'M', 1, false), token, 2, false);
    return put(put(out, 'J', 1, false), token, 4, false);
  }
  static uint8_t* tail(uint8_t* begin, uint8_t* out, Py_ssize_t num_tokens) {
    out = put(out, num_tokens > 3 ? 't' : 0x84 + num_tokens, 1, false);
    std::memcpy(out, "\x94N\x87\x94.", 5);
    out += 5;
    put(begin + 3, uint64_t(out - begin - 11), 8, false);
    return out;
  }
};

class Cbor {
 public:
  static uint8_t* head(uint8_t* out, const uint8_t* parent, size_t size, Py_ssize_t num_tokens) {
    out = number(put(out, 0x83, 1, true), 0x40, uint32_t(size));
    std::memcpy(out, parent, size);
    return number(out + size, 0x80, uint32_t(num_tokens));
  }
  static uint8_t* token(uint8_t* out, uint32_t token) { return number(out, 0x00, token); }
  static uint8_t* tail(uint8_t*, uint8_t* out, Py_ssize_t) { return put(out, 0xf6, 1, true); }

 private:
  static uint8_t* number(uint8_t* out, uint8_t kind, uint32_t value) {
    if (value < 24) return put(out, kind | value, 1, true);
    if (value < 0x100) return put(put(out, kind | 24, 1, true), value, 1, true);
    if (value < 0x10000) return put(put(out, kind | 25, 1, true), value, 2, true);
    return put(put(out, kind | 26, 1, true), value, 4, true);
  }
};

// Appends the hashes of all full blocks; false with or without an error: without one, a token is not a plain number.
template <typename Encoding>
bool hash_blocks(const uint8_t* parent, size_t parent_size, const Items& tokens, Py_ssize_t block_size, PyObject* hashes) {
  std::vector<uint8_t> buffer(size_t(block_size) * kTokenBytesMax + kOverheadBytes);
  uint8_t digest[kDigestBytes];
  for (Py_ssize_t block = 0, n = tokens.size() / block_size; block < n; ++block) {
    uint8_t* out = Encoding::head(buffer.data(), parent, parent_size, block_size);
    for (Py_ssize_t i = 0; i < block_size; ++i) {
      PyObject* item = tokens[block * block_size + i];
      if (!PyLong_CheckExact(item)) return false;
      int overflow = 0;
      const long token = PyLong_AsLongAndOverflow(item, &overflow);
      if (overflow != 0 || token < 0 || token > INT32_MAX) return false;
      out = Encoding::token(out, uint32_t(token));
    }
    out = Encoding::tail(buffer.data(), out, block_size);
    sha256(buffer.data(), size_t(out - buffer.data()), digest);
    PyObject* hash = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digest), kDigestBytes);
    const bool added = hash != nullptr && PyList_Append(hashes, hash) == 0;
    Py_XDECREF(hash);
    if (!added) return false;
    parent = digest;
    parent_size = kDigestBytes;
  }
  return true;
}

}  // namespace

// hash_chain(parent, tokens, block_size, is_cbor) -> list of hashes, or None for what only the reference can encode.
PyObject* hash_chain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("hash_chain", count, 4)) return nullptr;
  char* parent = nullptr;
  Py_ssize_t parent_size = 0;
  if (PyBytes_AsStringAndSize(args[0], &parent, &parent_size) != 0) return nullptr;
  const Py_ssize_t block_size = PyLong_AsSsize_t(args[2]);
  const int is_cbor = PyObject_IsTrue(args[3]);
  if (PyErr_Occurred()) return nullptr;
  if (block_size < 1 || block_size > kBlockTokensMax || parent_size > 255) Py_RETURN_NONE;
  Items tokens(args[1]);
  PyObject* hashes = tokens.ok() ? PyList_New(0) : nullptr;
  if (hashes == nullptr) return nullptr;
  const uint8_t* root = reinterpret_cast<const uint8_t*>(parent);
  const bool done = is_cbor ? hash_blocks<Cbor>(root, size_t(parent_size), tokens, block_size, hashes)
                            : hash_blocks<Pickle>(root, size_t(parent_size), tokens, block_size, hashes);
  if (done) return hashes;
  Py_DECREF(hashes);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace kv_core
