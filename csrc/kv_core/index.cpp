// The index of a pool: key → block, or → dict of blocks by id. What the reference does with a Python dict, in two thirds of
// its memory, of which nothing is left behind when it grows, and where a block is found and removed in one go.
#include "records.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace kv_core {

PyTypeObject* index_type = nullptr;

namespace {

constexpr uint64_t kSmallestCapacity = 16;
constexpr uint64_t kLoadTenths = 7;           // of `expected` entries in the capacity made for them
constexpr size_t kMappedBytesMin = 1u << 17;  // such tables are mapped, so that all of them goes back to the system

Index* self_of(PyObject* self) { return reinterpret_cast<Index*>(self); }

size_t table_bytes(uint64_t capacity) { return capacity * (sizeof(Entry) + sizeof(uint32_t)); }

// Zeroed; null without memory.
void* allocate(size_t bytes) {
  if (bytes < kMappedBytesMin) return std::calloc(1, bytes);
  void* table = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return table == MAP_FAILED ? nullptr : table;
}

void release_table(void* table, size_t bytes) {
  if (bytes < kMappedBytesMin) {
    std::free(table);
  } else {
    munmap(table, bytes);
  }
}

uint64_t after(const Index* index, uint64_t place) { return place + 1 == index->capacity ? 0 : place + 1; }

uint64_t home(const Index* index, uint32_t hash) { return (uint64_t(hash) * index->capacity) >> 32; }

void put(Index* index, uint32_t hash, Entry entry) {
  uint64_t place = home(index, hash);
  while (index->hashes[place] != 0) place = after(index, place);
  index->hashes[place] = hash;
  index->entries[place] = entry;
}

// Makes room for so many more entries. Doubles, but goes to what is expected as soon as that is near.
bool make_room(Index* index, Py_ssize_t more) {
  const uint64_t wanted = uint64_t(index->used + more) * 10;
  if (wanted <= index->capacity * (kLoadTenths + 1)) return true;
  uint64_t capacity = index->capacity == 0 ? kSmallestCapacity : 2 * index->capacity;
  while (wanted > capacity * (kLoadTenths + 1)) capacity *= 2;
  const uint64_t expected = std::max(kSmallestCapacity, uint64_t(index->expected) * 10 / kLoadTenths);
  const bool is_enough = wanted <= expected * (kLoadTenths + 1) && expected > index->capacity * 5 / 4;
  if (capacity > expected / 2 && is_enough) capacity = expected;
  void* table = allocate(table_bytes(capacity));
  if (table == nullptr) {
    PyErr_NoMemory();
    return false;
  }
  const Index old = *index;
  index->entries = static_cast<Entry*>(table);
  index->hashes = reinterpret_cast<uint32_t*>(index->entries + capacity);
  index->capacity = capacity;
  for (uint64_t place = 0; place < old.capacity; ++place) {
    if (old.hashes[place] != 0) put(index, old.hashes[place], old.entries[place]);
  }
  if (old.capacity > 0) release_table(old.entries, table_bytes(old.capacity));
  return true;
}

// A key that is not there yet; takes its own references.
bool add(Index* index, PyObject* key, uint32_t hash, PyObject* value) {
  if (!make_room(index, 1)) return false;
  Py_INCREF(key);
  Py_INCREF(value);
  put(index, hash, {key, value});
  index->used += 1;
  return true;
}

void empty(Index* index) {
  const Index old = *index;
  index->entries = nullptr;
  index->hashes = nullptr;
  index->capacity = 0;
  index->used = 0;
  for (uint64_t place = 0; place < old.capacity; ++place) {
    if (old.hashes[place] == 0) continue;
    Py_DECREF(old.entries[place].key);
    Py_DECREF(old.entries[place].value);
  }
  if (old.capacity > 0) release_table(old.entries, table_bytes(old.capacity));
}

bool is_key(PyObject* key) {
  if (Py_TYPE(key) == &PyBytes_Type || PyBytes_Check(key)) return true;
  PyErr_SetString(PyExc_TypeError, "keys of the index are bytes");
  return false;
}

PyObject* key_error(PyObject* key) {
  PyErr_SetObject(PyExc_KeyError, key);
  return nullptr;
}

PyObject* new_reference(PyObject* object) {
  Py_INCREF(object);
  return object;
}

int init(PyObject* self, PyObject* args, PyObject*) {
  Py_ssize_t expected = 0;
  if (!PyArg_ParseTuple(args, "|n", &expected)) return -1;
  if (expected < 0 || expected > INT32_MAX) {
    PyErr_Format(PyExc_ValueError, "%zd expected entries are out of range", expected);
    return -1;
  }
  self_of(self)->expected = expected;
  return 0;
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  empty(self_of(self));
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(reinterpret_cast<PyObject*>(type));
}

Py_ssize_t length(PyObject* self) { return self_of(self)->used; }

int contains(PyObject* self, PyObject* key) {
  return is_key(key) ? find_entry(self_of(self), key, hash_of(key)) != kNowhere : -1;
}

PyObject* subscript(PyObject* self, PyObject* key) {
  if (!is_key(key)) return nullptr;
  const uint64_t place = find_entry(self_of(self), key, hash_of(key));
  return place == kNowhere ? key_error(key) : new_reference(self_of(self)->entries[place].value);
}

int assign_subscript(PyObject* self, PyObject* key, PyObject* value) {
  if (!is_key(key)) return -1;
  Index* index = self_of(self);
  const uint32_t hash = hash_of(key);
  const uint64_t place = find_entry(index, key, hash);
  if (value == nullptr) {
    if (place == kNowhere) {
      key_error(key);
      return -1;
    }
    erase_entry(index, place);
    return 0;
  }
  if (place == kNowhere) return add(index, key, hash, value) ? 0 : -1;
  assign(index->entries[place].value, value);
  return 0;
}

bool one_or_two(const char* name, Py_ssize_t count) {
  if (count == 1 || count == 2) return true;
  PyErr_Format(PyExc_TypeError, "%s takes one or two arguments, got %zd", name, count);
  return false;
}

PyObject* get(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (!one_or_two("get", count) || !is_key(args[0])) return nullptr;
  const uint64_t place = find_entry(self_of(self), args[0], hash_of(args[0]));
  if (place != kNowhere) return new_reference(self_of(self)->entries[place].value);
  return new_reference(count == 2 ? args[1] : Py_None);
}

PyObject* set_default(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (wrong_count("setdefault", count, 2) || !is_key(args[0])) return nullptr;
  Index* index = self_of(self);
  const uint32_t hash = hash_of(args[0]);
  const uint64_t place = find_entry(index, args[0], hash);
  if (place != kNowhere) return new_reference(index->entries[place].value);
  return add(index, args[0], hash, args[1]) ? new_reference(args[1]) : nullptr;
}

PyObject* pop(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  if (!one_or_two("pop", count) || !is_key(args[0])) return nullptr;
  Index* index = self_of(self);
  const uint64_t place = find_entry(index, args[0], hash_of(args[0]));
  if (place == kNowhere) return count == 2 ? new_reference(args[1]) : key_error(args[0]);
  PyObject* value = new_reference(index->entries[place].value);
  erase_entry(index, place);
  return value;
}

PyObject* clear(PyObject* self, PyObject*) {
  empty(self_of(self));
  Py_RETURN_NONE;
}

// `each(index, key, hash, keys left)` for every key, until it is false.
template <typename Each>
PyObject* for_keys(PyObject* self, PyObject* sequence, Each each) {
  Items keys(sequence);
  if (!keys.ok()) return nullptr;
  for (Py_ssize_t i = 0, n = keys.size(); i < n; ++i) {
    PyObject* key = keys[i];
    if (!is_key(key) || !each(self_of(self), key, hash_of(key), n - i)) return nullptr;
  }
  Py_RETURN_NONE;
}

// The index as a set: its values are None.
PyObject* add_keys(PyObject* self, PyObject* keys) {
  return for_keys(self, keys, [](Index* index, PyObject* key, uint32_t hash, Py_ssize_t more) {
    if (!make_room(index, more)) return false;
    uint64_t place = home(index, hash);
    for (; index->hashes[place] != 0; place = after(index, place)) {
      if (index->hashes[place] == hash && is_same(index->entries[place].key, key)) return true;
    }
    Py_INCREF(key);
    Py_INCREF(Py_None);
    index->hashes[place] = hash;
    index->entries[place] = {key, Py_None};
    index->used += 1;
    return true;
  });
}

PyObject* drop_keys(PyObject* self, PyObject* keys) {
  return for_keys(self, keys, [](Index* index, PyObject* key, uint32_t hash, Py_ssize_t) {
    const uint64_t place = find_entry(index, key, hash);
    if (place != kNowhere) erase_entry(index, place);
    return true;
  });
}

// A list of `item(entry)` for each entry.
template <typename Item>
PyObject* listed(const Index* index, Item item) {
  PyObject* list = PyList_New(index->used);
  Py_ssize_t count = 0;
  for (uint64_t place = 0; list != nullptr && place < index->capacity; ++place) {
    if (index->hashes[place] == 0) continue;
    PyObject* made = item(index->entries[place]);
    if (made == nullptr) {
      Py_CLEAR(list);
    } else {
      PyList_SetItem(list, count++, made);
    }
  }
  return list;
}

PyObject* items(PyObject* self, PyObject*) {
  return listed(self_of(self), [](const Entry& entry) { return PyTuple_Pack(2, entry.key, entry.value); });
}

PyObject* values(PyObject* self, PyObject*) {
  return listed(self_of(self), [](const Entry& entry) { return new_reference(entry.value); });
}

PyObject* iterate(PyObject* self) {
  PyObject* keys = listed(self_of(self), [](const Entry& entry) { return new_reference(entry.key); });
  PyObject* iterator = keys == nullptr ? nullptr : PyObject_GetIter(keys);
  Py_XDECREF(keys);
  return iterator;
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"get", fast(get), METH_FASTCALL, nullptr},
    {"setdefault", fast(set_default), METH_FASTCALL, nullptr},
    {"pop", fast(pop), METH_FASTCALL, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"add_keys", add_keys, METH_O, "add_keys($self, keys, /)\n--\n\nThe index as a set: its values are None."},
    {"drop_keys", drop_keys, METH_O, "drop_keys($self, keys, /)\n--\n\nThose of the keys that there are vanish."},
    {"items", items, METH_NOARGS, "items($self)\n--\n\nA list, in no order."},
    {"values", values, METH_NOARGS, "values($self)\n--\n\nA list, in no order."},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_init, reinterpret_cast<void*>(init)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_iter, reinterpret_cast<void*>(iterate)},
    {Py_mp_length, reinterpret_cast<void*>(length)},
    {Py_mp_subscript, reinterpret_cast<void*>(subscript)},
    {Py_mp_ass_subscript, reinterpret_cast<void*>(assign_subscript)},
    {Py_sq_contains, reinterpret_cast<void*>(contains)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"vllm._kv_core.Index", sizeof(Index), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};

}  // namespace

bool is_same(PyObject* left, PyObject* right) {
  if (left == right) return true;
  const Py_ssize_t size = PyBytes_Size(left);
  return size == PyBytes_Size(right) && std::memcmp(PyBytes_AsString(left), PyBytes_AsString(right), size_t(size)) == 0;
}

uint32_t hash_of(PyObject* key) {
  // The text's own hash is kept in the object. 0 stands for an empty place.
  const uint64_t hash = uint64_t(PyObject_Hash(key)) * 0x9e3779b97f4a7c15ull >> 32;
  return hash == 0 ? 1 : uint32_t(hash);
}

uint64_t find_entry(const Index* index, PyObject* key, uint32_t hash) {
  if (index->used == 0) return kNowhere;
  for (uint64_t place = home(index, hash); index->hashes[place] != 0; place = after(index, place)) {
    if (index->hashes[place] != hash) continue;
    if (index->entries[place].key == key || is_same(index->entries[place].key, key)) return place;
  }
  return kNowhere;
}

void expect_entry(const Index* index, uint32_t hash) {
  if (index->capacity == 0) return;
  const uint64_t place = home(index, hash);
  __builtin_prefetch(index->hashes + place);
  __builtin_prefetch(index->entries + place);
  __builtin_prefetch(index->entries + place + 4);  // where it mostly is if not in the first cache line
}

void erase_entry(Index* index, uint64_t place) {
  const Entry gone = index->entries[place];
  uint64_t hole = place;
  // Whatever follows without a gap moves into the hole, unless it would come before its home.
  for (uint64_t next = after(index, hole); index->hashes[next] != 0; next = after(index, next)) {
    const uint64_t wanted = home(index, index->hashes[next]);
    const bool stays = hole <= next ? hole < wanted && wanted <= next : hole < wanted || wanted <= next;
    if (stays) continue;
    index->hashes[hole] = index->hashes[next];
    index->entries[hole] = index->entries[next];
    hole = next;
  }
  index->hashes[hole] = 0;
  index->used -= 1;
  Py_DECREF(gone.key);
  Py_DECREF(gone.value);
}

Index* as_index(PyObject* object) {
  if (PyObject_TypeCheck(object, index_type)) return reinterpret_cast<Index*>(object);
  PyErr_SetString(PyExc_TypeError, "a native index is needed");
  return nullptr;
}

bool add_index_type(PyObject* module) {
  index_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return index_type != nullptr && PyModule_AddObjectRef(module, "Index", reinterpret_cast<PyObject*>(index_type)) == 0;
}

}  // namespace kv_core
