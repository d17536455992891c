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

// Of Python's stable interface, looked up in the running process: this library is built without its headers.
typedef void* (*TupleItem)(void* tuple, int64_t i);
typedef void* (*NewBytes)(const char* from, int64_t size);

}  // namespace

// Whether `exchange` is laid out as it is here.
EXPORTED int64_t kvgroups_can_describe(const Exchange* exchange) {
  return exchange->major_version == 1 && exchange->describe && dlsym(RTLD_DEFAULT, "PyTuple_GetItem") &&
         dlsym(RTLD_DEFAULT, "PyBytes_FromStringAndSize");
}

// A bytes object: the addresses of a tuple's tensors, 0 for `none`, and then of each what else describes it. Null, with a
// Python error set, if something else is in the tuple. Called with Python's lock.
EXPORTED void* kvgroups_describe(void* tuple, int64_t count, void* none, const Exchange* exchange) {
  static const TupleItem item = (TupleItem)dlsym(RTLD_DEFAULT, "PyTuple_GetItem");
  static const NewBytes new_bytes = (NewBytes)dlsym(RTLD_DEFAULT, "PyBytes_FromStringAndSize");
  static thread_local std::vector<int64_t> numbers;
  numbers.assign(count, 0);
  for (int64_t i = 0; i < count; ++i) {
    void* object = item(tuple, i);
    if (object == none) {
      numbers.push_back(-1);
      continue;
    }
    Tensor tensor;
    if (exchange->describe(object, &tensor) != 0) return nullptr;
    numbers[i] = (int64_t)(tensor.data + tensor.byte_offset);
    numbers.push_back(tensor.num_dims);
    numbers.push_back((int64_t)tensor.device_type << 32 | tensor.device_id);
    numbers.push_back(tensor.type_code | (int64_t)tensor.type_bits << 8 | (int64_t)tensor.type_lanes << 16);
    numbers.insert(numbers.end(), tensor.shape, tensor.shape + tensor.num_dims);
    numbers.insert(numbers.end(), tensor.strides, tensor.strides + tensor.num_dims);
  }
  return new_bytes((const char*)numbers.data(), (int64_t)(numbers.size() * sizeof(int64_t)));
}
