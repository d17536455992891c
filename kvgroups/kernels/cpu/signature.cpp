// What the tensors of a call are, and where they lie, asked of PyTorch in one go.
//
// From Python each shape, stride, dtype and address is an object of its own, and for a short context they take longer
// than attention. DLPack has a C interface that fills a struct instead. Source: dlpack.h of DLPack 1.3.

#include <dlfcn.h>
#include <stdint.h>

#include <vector>

#include "runtime.h"

namespace {

struct Tensor {  // DLTensor
  char* data;
  int32_t device_type, device_id, num_dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  const int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Exchange {  // DLPackExchangeAPI
  uint32_t major_version, minor_version;
  void *older, *allocate, *export_tensor, *import_tensor;
  int (*describe)(void* python_object, Tensor* to);  // what the object owns; not 0: it is no such tensor
};

// Objects of the running process.
struct Known {
  const void *none, *tensor, *parameter;  // None, and two classes whose memory is their own
  const Exchange* exchange;
};

// Of Python's stable interface, looked up in the running process: this library is built without its headers.
template <typename Function>
Function python(const char* name) { return (Function)dlsym(RTLD_DEFAULT, name); }

// A class of its own may have no memory, as PyTorch's fake tensors, and yet tell PyTorch of an address.
bool is_plain(void* object, const Known& known) {
  static const auto type_of = python<void* (*)(void*)>("PyObject_Type");
  static const auto release = python<void (*)(void*)>("Py_DecRef");
  void* type = type_of(object);
  release(type);
  return type == known.tensor || type == known.parameter;
}

}  // namespace

// Whether `exchange` is laid out as it is here.
EXPORTED int64_t kvgroups_can_describe(const Exchange* exchange) {
  return exchange->major_version == 1 && exchange->describe && python<void*>("PyTuple_GetItem");
}

// A bytes object: the addresses of a tuple's tensors, 0 for None, and then of each what else describes it. Empty if
// something in the tuple is no tensor, or one that is not plain memory. Called with Python's lock.
EXPORTED void* kvgroups_describe(void* tuple, int64_t count, const Known* known) {
  static const auto item = python<void* (*)(void* tuple, int64_t i)>("PyTuple_GetItem");
  static const auto new_bytes = python<void* (*)(const char* from, int64_t size)>("PyBytes_FromStringAndSize");
  static const auto forget_error = python<void (*)()>("PyErr_Clear");
  static thread_local std::vector<int64_t> numbers;
  numbers.assign(count, 0);
  for (int64_t i = 0; i < count; ++i) {
    void* object = item(tuple, i);
    if (object == known->none) {
      numbers.push_back(-1);
      continue;
    }
    Tensor tensor;
    if (!is_plain(object, *known) || known->exchange->describe(object, &tensor) != 0) {
      forget_error();
      return new_bytes("", 0);
    }
    numbers[i] = (int64_t)(tensor.data + tensor.byte_offset);
    numbers.push_back(tensor.num_dims);
    numbers.push_back((int64_t)tensor.device_type << 32 | tensor.device_id);
    numbers.push_back(tensor.type_code | (int64_t)tensor.type_bits << 8 | (int64_t)tensor.type_lanes << 16);
    numbers.insert(numbers.end(), tensor.shape, tensor.shape + tensor.num_dims);
    numbers.insert(numbers.end(), tensor.strides, tensor.strides + tensor.num_dims);
  }
  return new_bytes((const char*)numbers.data(), (int64_t)(numbers.size() * sizeof(int64_t)));
}
