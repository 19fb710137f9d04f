// The records of the KV core as C structs: blocks and the list of free ones. Python's limited API only, so that one
// library serves every Python version. The Python classes of the same names are the reference; see README.md.
#pragma once

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstdint>

namespace kv_core {

constexpr uint32_t kNoTokens = UINT32_MAX;

// One block. 64 bytes, and not tracked by the garbage collector: `owner` is a weak reference wherever the pool allows
// one, and links are taken apart by whoever takes a block from the list or by the list itself when it goes.
struct Block {
  PyObject ob_base;
  PyObject* hash;   // bytes, or null
  Block* previous;  // strong, both links or none while queued
  Block* next;
  PyObject* owner;  // weak reference to the pool, the pool itself where it allows none, or null
  int32_t id;
  int32_t references;
  uint32_t num_tokens;  // kNoTokens: none
  char is_null;
};

struct Queue {
  PyObject ob_base;
  Block* head;
  Block* tail;
  Block* last_blank;  // see the reference; strong
  Py_ssize_t size;
  uint64_t* ages;  // by block id; null while nobody wants them
  Py_ssize_t num_ages;
  uint64_t next_age;
};

struct Tally {
  PyObject ob_base;
  Py_ssize_t evicted;
};

struct Entry {
  PyObject* key;  // bytes
  PyObject* value;
};

// A table with open addressing: an entry is at the home of its key's hash or behind it, with no empty place between.
struct Index {
  PyObject ob_base;
  Entry* entries;
  uint32_t* hashes;  // behind the entries; 0: an empty place
  uint64_t capacity;
  Py_ssize_t used;
  Py_ssize_t expected;
};

constexpr uint64_t kNowhere = UINT64_MAX;

extern PyTypeObject* block_type;
extern PyTypeObject* index_type;
extern PyTypeObject* tally_type;
extern PyTypeObject* queue_type;
extern PyObject* invariant_error;

inline Block* as_block(PyObject* object) {
  if (Py_TYPE(object) == block_type) return reinterpret_cast<Block*>(object);
  PyErr_SetString(PyExc_TypeError, "a native block is needed");
  return nullptr;
}

inline PyObject* as_object(Block* block) { return reinterpret_cast<PyObject*>(block); }

// Blocks that follow each other in the queue mostly lie at equal distances: fetches the one that a walk will be at soon.
inline void expect_followers(const Block* block, const Block* next) {
  constexpr uintptr_t kFollowers = 12;
  const uintptr_t here = reinterpret_cast<uintptr_t>(block), there = reinterpret_cast<uintptr_t>(next);
  __builtin_prefetch(reinterpret_cast<const void*>(there + kFollowers * (there - here)));
}

// `target = value` for a strong reference.
template <typename T>
inline void assign(T*& target, T* value) {
  Py_XINCREF(reinterpret_cast<PyObject*>(value));
  T* old = target;
  target = value;
  Py_XDECREF(reinterpret_cast<PyObject*>(old));
}

// A strong reference to what is known to be a T.
template <typename T>
T* held(PyObject* object) {
  Py_INCREF(object);
  return reinterpret_cast<T*>(object);
}

// Any sequence as a list or a tuple whose items can be borrowed.
class Items {
 public:
  explicit Items(PyObject* object) {
    if (PyList_Check(object) || PyTuple_Check(object)) {
      Py_INCREF(object);
      owned_ = object;
    } else {
      owned_ = PySequence_List(object);
    }
    is_list_ = owned_ != nullptr && PyList_Check(owned_);
  }
  ~Items() { Py_XDECREF(owned_); }
  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;
  bool ok() const { return owned_ != nullptr; }
  PyObject* object() const { return owned_; }
  Py_ssize_t size() const { return is_list_ ? PyList_Size(owned_) : PyTuple_Size(owned_); }
  // Borrowed. Nothing that runs Python code may happen while it is used.
  PyObject* operator[](Py_ssize_t i) const {
    return is_list_ ? PyList_GetItem(owned_, i) : PyTuple_GetItem(owned_, i);
  }

 private:
  PyObject* owned_ = nullptr;
  bool is_list_ = false;
};

bool add_block_type(PyObject* module);
bool add_index_type(PyObject* module);
bool add_queue_type(PyObject* module);
bool add_search_type(PyObject* module);
bool add_tally_type(PyObject* module);
// Null with TypeError for anything else.
Index* as_index(PyObject* object);
uint32_t hash_of(PyObject* key);
bool is_same(PyObject* left, PyObject* right);
// Where the entry of a key is, or kNowhere.
uint64_t find_entry(const Index* index, PyObject* key, uint32_t hash);
// The entry will be looked for soon.
void expect_entry(const Index* index, uint32_t hash);
void erase_entry(Index* index, uint64_t place);
// Takes a queued block out; false with RuntimeError if it is not queued.
bool unlink(Queue* queue, Block* block);
// A new list of the first `count` blocks, which there are, out of the queue; null with an error. `each(block)` is told of each, and
// must not run Python code; false is an error, and the end.
template <typename Each>
PyObject* pop_front(Queue* queue, Py_ssize_t count, Each each) {
  PyObject* taken = PyList_New(count);
  Block* head = queue->head;
  Block* block = head->next;
  Py_ssize_t done = 0;
  bool ok = taken != nullptr;
  for (; ok && done < count; ++done) {
    if (block == nullptr || block == queue->tail) {
      PyErr_SetString(PyExc_RuntimeError, "the free queue is shorter than its count");
      ok = false;
      break;
    }
    Block* next = block->next;
    expect_followers(block, next);
    block->previous = block->next = nullptr;
    if (block == queue->last_blank) assign(queue->last_blank, head);
    ok = each(block);
    // Of the references of its two neighbours' links one goes to the list.
    Py_DECREF(as_object(block));
    PyList_SetItem(taken, done, as_object(block));
    // One that `each` failed for is off the queue all the same, so it counts.
    block = next;
  }
  if (done > 0 && block != nullptr) {
    head->next = block;  // the reference of the last block's link
    block->previous = head;
    queue->size -= done;
  }
  if (!ok) Py_CLEAR(taken);
  return taken;
}

PyObject* make_blocks(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* bind_take(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* touch(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* bind_find_cached(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* lacking(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* pack_block_ids(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* pack_token_counts(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* count_before(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* release(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* hash_chain(PyObject*, PyObject* const* args, Py_ssize_t count);

bool wrong_count(const char* name, Py_ssize_t count, Py_ssize_t wanted);

}  // namespace kv_core
