// The device "sim": a simulated accelerator, on which tests see what the host of a GPU sees.
//
// Kernels are the CPU's and run at once, in the order in which the host queues them. So results are those of the CPU,
// and what is simulated is only what a host can observe:
//
// - Two devices with streams, events and pinned memory, as a PrivateUse1 backend of torch.
// - Pointers to device memory are no valid addresses: host code that follows one crashes.
// - A non_blocking copy to pinned memory arrives when the host waits for it (for an event, a stream or the device).
//   Until then its bytes are 0xFF, which is NaN or -1, so a result that is read too early is always wrong.
// - The source of a non_blocking copy from pinned memory must not change before that copy is complete.
// - Each launch, and each wait of the host, is counted. Waits also call a Python function, which knows the line.
// - It is a hazard if an op uses a tensor that another stream, not ordered by an event, writes; or writes one that
//   another stream reads.
// - Backwards run in an autograd thread of the device. Autocast has the op lists that torch has for CUDA.
//
// Not simulated: numerics of GPU kernels, graphs, compilers, collectives, launches and waits inside a kernel, and
// memory that is used again while another stream still reads it.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {
using at::Tensor;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;

// ---- addresses -----------------------------------------------------------------------------------------------------

// No x86-64 or Arm address has this bit set.
constexpr uintptr_t kDeviceBit = uintptr_t(1) << 62;

void* to_address(const void* pointer) { return reinterpret_cast<void*>(uintptr_t(pointer) & ~kDeviceBit); }
void* to_pointer(const void* address) {
  return address ? reinterpret_cast<void*>(uintptr_t(address) | kDeviceBit) : nullptr;
}

// ---- what is queued, and what is complete --------------------------------------------------------------------------

// Time is counted per stream: the n-th thing that the host queues on a stream has the time n.
using StreamKey = std::pair<DeviceIndex, int64_t>;
using Times = std::map<StreamKey, uint64_t>;

struct Copy {
  uint64_t time;
  Tensor host, contents;
  bool to_host;
};
struct StreamWait {  // a stream that waits for an event of another
  uint64_t time;
  StreamKey other;
  uint64_t other_time;
};
struct Queue {
  uint64_t queued = 0, complete = 0;
  std::vector<Copy> copies;
  std::vector<StreamWait> waits;
  Times after;  // what runs on this stream from now on runs after these times of other streams
};
struct Event {
  StreamKey stream{0, 0};
  uint64_t time = 0;
  Times after;
};
struct Use {
  StreamKey stream;
  uint64_t time;
  std::string op;
};
struct Uses {
  std::optional<Use> last_write;
  std::vector<Use> reads_since;
};
struct OpCount {
  int64_t launches = 0, tensors = 0, bytes = 0;
};

std::recursive_mutex mutex;  // of everything below; never held while Python is called
std::map<StreamKey, Queue> queues;
std::unordered_map<const void*, Uses> uses;  // by the address of a storage
std::map<std::string, OpCount> ops;
std::map<std::string, int64_t> waits;
std::vector<std::string> hazards;
std::map<uintptr_t, uintptr_t> pinned;  // start and end of each block
PyObject* on_wait = nullptr;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local DeviceIndex current_device = 0;
thread_local int64_t current_stream[kDevices] = {0, 0};

StreamKey stream_on(c10::Device device) {
  auto index = device.index() < 0 ? current_device : device.index();
  return {index, current_stream[index]};
}

// Complete what a stream has queued up to some time, and what that waits for on other streams. `done` keeps copies
// until the lock is released, because freeing a tensor may call Python.
void complete(StreamKey key, uint64_t time, std::vector<Copy>& done) {
  auto& queue = queues[key];
  if (time <= queue.complete) return;
  queue.complete = time;
  std::vector<StreamWait> later_waits;
  for (const auto& wait : std::exchange(queue.waits, {})) {
    if (wait.time > time) later_waits.push_back(wait);
    else complete(wait.other, wait.other_time, done);
  }
  queue.waits.insert(queue.waits.begin(), later_waits.begin(), later_waits.end());
  std::vector<Copy> later_copies;
  for (auto& copy : std::exchange(queue.copies, {})) {
    if (copy.time > time) {
      later_copies.push_back(std::move(copy));
      continue;
    }
    auto *host = copy.host.data_ptr(), *contents = copy.contents.data_ptr();
    if (copy.to_host) std::memcpy(host, contents, copy.contents.nbytes());
    else if (std::memcmp(host, contents, copy.contents.nbytes()) != 0)
      hazards.push_back("pinned memory is written before its copy to the device is complete");
    done.push_back(std::move(copy));
  }
  queue.copies = std::move(later_copies);
}

void complete(StreamKey key, uint64_t time) {
  std::vector<Copy> done;
  Lock lock(mutex);
  complete(key, time, done);
}

void count_wait(const std::string& reason) {
  PyObject* callback;
  {
    Lock lock(mutex);
    waits[reason]++;
    callback = on_wait;
  }
  if (!callback || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  try {
    py::reinterpret_borrow<py::object>(callback)(reason);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("on_wait");
  }
}

void wait_for_stream(StreamKey key, const std::string& reason) {
  count_wait(reason);
  Lock lock(mutex);
  complete(key, queues[key].queued);
}

void count_launch(const std::string& op, int64_t tensors, int64_t bytes) {
  Lock lock(mutex);
  auto& counted = ops[op];
  counted.launches++;
  counted.tensors += tensors;
  counted.bytes += bytes;
}

bool is_on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }
int64_t bytes_of(const Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * int64_t(tensor.element_size()) : 0;
}

// Record that an op on a stream uses a tensor. It is a hazard if another stream may use it at the same time.
void note_use(const std::string& op, const Tensor& tensor, bool writes, StreamKey stream, uint64_t time) {
  if (!is_on_sim(tensor) || !tensor.storage().data()) return;
  auto& of_storage = uses[to_address(tensor.storage().data())];
  auto& after = queues[stream].after;
  auto overlaps = [&](const Use& other) {
    return other.stream != stream && after[other.stream] < other.time && queues[other.stream].complete < other.time;
  };
  const std::string cause = " on another stream, without an event in between";
  if (of_storage.last_write && overlaps(*of_storage.last_write))
    hazards.push_back(op + " uses what " + of_storage.last_write->op + " writes" + cause);
  if (!writes) {
    of_storage.reads_since.push_back({stream, time, op});
    if (of_storage.reads_since.size() > 8) of_storage.reads_since.erase(of_storage.reads_since.begin());
    return;
  }
  for (const auto& read : of_storage.reads_since)
    if (overlaps(read)) hazards.push_back(op + " writes what " + read.op + " reads" + cause);
  of_storage.last_write = Use{stream, time, op};
  of_storage.reads_since.clear();
}

// ---- memory --------------------------------------------------------------------------------------------------------

struct DeviceAllocator final : c10::Allocator {
  static void release(void* address) {
    {
      Lock lock(mutex);
      uses.erase(address);
    }
    std::free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(!bytes || !posix_memalign(&address, 512, bytes), "sim: out of memory");
    if (address) std::memset(address, 0xFF, bytes);  // uninitialised memory is NaN
    return {to_pointer(address), address, &release, c10::Device(kSim, current_device)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to_address(to), to_address(from), bytes);
  }
} device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  static void release(void* address) {
    {
      Lock lock(mutex);
      pinned.erase(uintptr_t(address));
    }
    std::free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 64, std::max(bytes, size_t(1))), "sim: out of pinned memory");
    Lock lock(mutex);
    pinned[uintptr_t(address)] = uintptr_t(address) + std::max(bytes, size_t(1));
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} pinned_allocator;

bool is_pinned_address(const void* address) {
  Lock lock(mutex);
  auto next = pinned.upper_bound(uintptr_t(address));
  return next != pinned.begin() && uintptr_t(address) < std::prev(next)->second;
}

// ---- devices, streams and events -----------------------------------------------------------------------------------

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, key.first), key.second);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kSim, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "sim has no device ", int(device.index()));
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return stream_of(stream_on(device)); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of({stream_on(device).first, 0}); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int64_t> streams{0};
    return stream_of({stream_on(device).first, ++streams});
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    const auto& queue = queues[key_of(stream)];
    return queue.complete >= queue.queued;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for_stream(key_of(stream), "stream"); }
  void synchronizeDevice(const DeviceIndex index) const override {
    count_wait("device");
    Lock lock(mutex);
    std::vector<StreamKey> keys;
    for (const auto& [key, _] : queues)
      if (key.first == index) keys.push_back(key);
    for (const auto& key : keys) complete(key, queues[key].queued);
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    auto& queue = queues[key_of(stream)];
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {key_of(stream), ++queue.queued, queue.after};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    const auto& recorded = *static_cast<Event*>(event);
    Lock lock(mutex);
    auto& queue = queues[key_of(stream)];
    queue.waits.push_back({++queue.queued, recorded.stream, recorded.time});
    auto order = [&](StreamKey key, uint64_t time) { queue.after[key] = std::max(queue.after[key], time); };
    order(recorded.stream, recorded.time);
    for (const auto& [key, time] : recorded.after) order(key, time);
  }
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Event*>(event);
    Lock lock(mutex);
    return !recorded || queues[recorded->stream].complete >= recorded->time;
  }
  void synchronizeEvent(void* event) const override {
    if (queryEvent(event)) return;
    const auto& recorded = *static_cast<Event*>(event);
    count_wait("event");
    complete(recorded.stream, recorded.time);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({kSim, index}); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device : std::exchange(current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* address) const override { return is_pinned_address(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return {kSim, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = device_allocator.allocate(bytes);
    std::memcpy(to_address(memory.get()), to_address(storage.data()), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

// ---- kernels: those of the CPU, on aliases of the device's tensors -------------------------------------------------

// A pointer that keeps `owner` alive, and with it the memory.
template <typename Owner>
c10::DataPtr borrowed(void* data, Owner owner, c10::Device device) {
  return {data, new Owner(std::move(owner)), [](void* kept) { delete static_cast<Owner*>(kept); }, device};
}

c10::Storage new_storage(size_t bytes, c10::DataPtr data, c10::Allocator* allocator) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), allocator, /*resizable=*/true);
}

Tensor new_tensor(c10::Storage storage, DispatchKeySet keys, caffe2::TypeMeta dtype) {
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
}

// The arguments of one op as CPU tensors with the same memory, and its results as tensors of the device again.
class Aliases {
 public:
  Tensor to_cpu(const Tensor& tensor) {
    if (!is_on_sim(tensor)) return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided, "sim has only strided tensors, got ", tensor.layout());
    const auto& storage = tensor.storage();
    auto known = aliases_.find(storage.unsafeGetStorageImpl());
    if (known == aliases_.end()) {
      auto data = borrowed(to_address(storage.data()), storage, c10::kCPU);
      auto alias = new_storage(storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU));
      originals_.emplace(alias.unsafeGetStorageImpl(), storage);
      known = aliases_.emplace(storage.unsafeGetStorageImpl(), alias).first;
    }
    auto alias = new_tensor(c10::Storage(known->second), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    copy_geometry(tensor, alias);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  // Ops with `out=` and some in-place ops resize an argument: give the device's tensor the new memory and shape.
  void adopt_resized() {
    for (auto& [tensor, alias] : pairs_) {
      auto* memory = alias.storage().unsafeGetStorageImpl();
      auto original = originals_.find(memory);
      if (original != originals_.end() && memory->data() != to_address(original->second.data())) {
        auto* impl = original->second.unsafeGetStorageImpl();
        impl->set_data_ptr(borrowed(to_pointer(memory->data()), alias.storage(), tensor.device()));
        impl->set_nbytes(memory->nbytes());
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  // Return a result as a tensor of the device: an argument itself, a view of one, or (then `is_new`) new memory.
  Tensor to_device(const Tensor& result, c10::Device device, bool& is_new) {
    if (!result.defined()) return result;
    for (auto& [tensor, alias] : pairs_)
      if (alias.is_same(result)) return tensor;
    Tensor out;
    auto original = originals_.find(result.storage().unsafeGetStorageImpl());
    if (original == originals_.end()) {
      is_new = true;
      auto data = borrowed(to_pointer(result.storage().data()), result, device);
      auto storage = new_storage(result.storage().nbytes(), std::move(data), &device_allocator);
      out = new_tensor(std::move(storage), DispatchKeySet(DispatchKey::PrivateUse1), result.dtype());
    } else {
      // A view of an inference tensor is one too, so it has the keys of its base.
      auto keys = base_keys(original->second) - DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
      out = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(original->second), keys, result.dtype());
    }
    copy_geometry(result, out);
    return out;
  }

  size_t size() const { return pairs_.size(); }

 private:
  static void copy_geometry(const Tensor& from, const Tensor& to) {
    to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
    if (from.unsafeGetTensorImpl()->is_wrapped_number()) to.unsafeGetTensorImpl()->set_wrapped_number(true);
    if (from.is_conj()) to._set_conj(true);
    if (from.is_neg()) to._set_neg(true);
  }
  DispatchKeySet base_keys(const c10::Storage& storage) const {
    for (const auto& [tensor, _] : pairs_)
      if (tensor.storage().is_alias_of(storage)) return tensor.key_set();
    return DispatchKeySet(DispatchKey::PrivateUse1);
  }

  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of the device, and its alias on the CPU
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases_, originals_;
};

std::vector<Tensor> tensors_in(const c10::IValue& value) {
  if (value.isTensor()) return {value.toTensor()};
  if (value.isTensorList()) return value.toTensorVector();
  std::vector<Tensor> tensors;
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) tensors.push_back(*tensor);
  return tensors;
}

bool starts_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// CUDA takes CPU tensors beside its own only without dimensions; these ops do not take them at all.
void check_devices(const std::string& name, at::ArrayRef<c10::IValue> values) {
  const bool is_foreach = starts_with(name, "aten::_foreach_");
  const bool takes_none = starts_with(name, "aten::_amp_") || starts_with(name, "aten::_fused_") ||
                          name == "aten::cat" || name == "aten::stack";
  std::optional<c10::Device> device;
  bool has_cpu = false;
  for (const auto& value : values) {
    for (const auto& tensor : tensors_in(value)) {
      if (!tensor.defined()) continue;
      if (!is_on_sim(tensor)) {
        has_cpu |= tensor.dim() > 0 || takes_none || (is_foreach && value.isTensorList());
      } else {
        const bool is_alone = !device || tensor.device() == *device || !tensor.dim();
        TORCH_CHECK(is_alone, name, ": tensors are on ", *device, " and ", tensor.device());
        device = device.value_or(tensor.device());
      }
    }
  }
  TORCH_CHECK(!device || !has_cpu, name, ": expected all tensors to be on ", *device, ", but one is on the CPU");
}

// On CUDA, the host has to know how large the results of these are.
const std::set<std::string> kSizeDependsOnValues = {
    "aten::_unique", "aten::_unique2", "aten::argwhere", "aten::bincount", "aten::masked_select", "aten::nonzero",
    "aten::repeat_interleave", "aten::unique_consecutive", "aten::unique_dim"};

bool is_mask(const Tensor& index) {
  return index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
}

// All ops without a kernel below.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const auto& parameters = schema.arguments();
  const auto first = stack->size() - parameters.size();
  check_devices(name, at::ArrayRef<c10::IValue>(*stack).slice(first));
  Aliases aliases;
  std::optional<c10::Device> device;
  std::vector<std::pair<Tensor, bool>> arguments;  // and whether the op writes to it
  int64_t tensors = 0, bytes = 0;
  bool has_mask = false;
  for (size_t i = 0; i < parameters.size(); i++) {
    auto& value = (*stack)[first + i];
    const bool writes = parameters[i].alias_info() && parameters[i].alias_info()->isWrite();
    auto to_cpu = [&](const Tensor& tensor) {
      tensors++;
      if (is_on_sim(tensor)) {
        device = device.value_or(tensor.device());
        arguments.emplace_back(tensor, writes);
        // An argument that is written is read as well, unless it only takes a result.
        bytes += bytes_of(tensor) * (writes && !parameters[i].is_out() && name != "aten::_foreach_copy_" ? 2 : 1);
      }
      return aliases.to_cpu(tensor);
    };
    if (value.isTensor()) {
      value = to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(to_cpu(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        has_mask |= tensor && is_mask(*tensor);
        list.push_back(tensor && tensor->defined() ? std::optional(to_cpu(*tensor)) : tensor);
      }
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      device = device.value_or(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  const bool has_scalar_on_cpu = size_t(tensors) > aliases.size();
  const StreamKey stream = stream_on(device.value_or(c10::Device(kSim, -1)));
  const c10::Device on(kSim, stream.first);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  aliases.adopt_resized();

  bool is_new = false, returns_number = false;
  std::vector<Tensor> results;
  auto to_device = [&](const Tensor& tensor) {
    results.push_back(aliases.to_device(tensor, on, is_new));
    return results.back();
  };
  for (auto place = stack->end() - schema.returns().size(); place != stack->end(); ++place) {
    auto& value = *place;
    if (value.isTensor()) {
      value = to_device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(to_device(tensor));
      value = list;
    } else {
      returns_number |= !value.isNone() && device && name != "aten::_has_compatible_shallow_copy_type";
    }
  }
  if (returns_number) wait_for_stream(stream, name);
  bool writes = false;
  for (const auto& [_, is_written] : arguments) writes |= is_written;
  if (!is_new && !writes) return;  // a view launches nothing
  const auto full_name = name + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  {
    Lock lock(mutex);
    const auto time = ++queues[stream].queued;
    for (const auto& [tensor, is_written] : arguments) note_use(full_name, tensor, is_written, stream, time);
    for (const auto& tensor : results) note_use(full_name, tensor, true, stream, time);
  }
  if (is_new)
    for (const auto& tensor : results) bytes += bytes_of(tensor);
  count_launch(full_name, tensors, bytes);
  // `index` has called `nonzero` for its masks already. `where` copies a scalar on the CPU to the device and waits for
  // the copy; other kernels take it as an argument.
  const bool has_size_to_read = kSizeDependsOnValues.count(name) || (has_mask && name != "aten::index");
  if (has_size_to_read || (name == "aten::where" && has_scalar_on_cpu)) wait_for_stream(stream, name);
}

const DispatchKeySet kKeys(DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim has only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "only CPU memory can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto bytes = size_t((c10::multiply_integers(size) + self.storage_offset()) * self.element_size());
  if (bytes > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor copy_between_devices(const Tensor& from, const Tensor& to) {
  Aliases aliases;
  aliases.to_cpu(to).copy_(aliases.to_cpu(from));
  const bool is_local = from.device() == to.device();
  count_launch(is_local ? "copy on the device" : "copy between devices", 2, bytes_of(from) + bytes_of(to));
  const StreamKey source = stream_on(from.device()), target = stream_on(to.device());
  Lock lock(mutex);
  // As in CUDA, a copy to another device is ordered with the current streams of both.
  if (source != target) queues[target].after[source] = queues[source].queued;
  const auto time = ++queues[target].queued;
  note_use("copy_", from, false, target, time);
  note_use("copy_", to, true, target, time);
  if (source != target) queues[source].after[target] = time;
  return to;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::NoGradGuard no_grad;
  if (is_on_sim(from) && is_on_sim(to)) return copy_between_devices(from, to);
  const bool to_host = is_on_sim(from);
  const auto &host = to_host ? to : from, &ours = to_host ? from : to;
  const StreamKey stream = stream_on(ours.device());
  const bool is_late = non_blocking && host.is_contiguous() && is_pinned_address(host.data_ptr());
  Aliases aliases;
  auto alias = aliases.to_cpu(ours);
  count_launch(to_host ? "copy to the host" : "copy to the device", 2, bytes_of(ours));
  {
    Lock lock(mutex);
    const auto time = ++queues[stream].queued;
    note_use("copy_", ours, !to_host, stream, time);
    if (is_late) {
      auto contents = at::empty(host.sizes(), host.options().pinned_memory(false)).copy_(to_host ? alias : host);
      if (to_host) std::memset(host.data_ptr(), 0xFF, host.nbytes());
      queues[stream].copies.push_back({time, host, contents, to_host});
    }
  }
  if (!to_host) alias.copy_(host);
  else if (!is_late) host.copy_(alias);
  // From pageable memory a non_blocking copy is staged, and the host goes on; to pageable memory it always waits.
  if (to_host ? !is_late : !non_blocking) wait_for_stream(stream, to_host ? "copy to the host" : "copy to the device");
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& self) {
  count_launch("item", 1, bytes_of(self));  // a copy to the host
  wait_for_stream(stream_on(self.device()), "item");
  return Aliases().to_cpu(self).item();
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  const int64_t size = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {size}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(self, new_storage(0, device_allocator.allocate(0), &device_allocator), 0, {0}, {1});
}
bool is_pinned(const Tensor&, std::optional<at::Device>) { return false; }
void record_stream(Tensor&, c10::Stream) {}

// Convolutions dispatch to these two on devices that torch does not know.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                   c10::IntArrayRef output_padding, int64_t groups) {
  Aliases aliases;
  bool is_new = false;
  auto bias_alias = bias && bias->defined() ? std::optional(aliases.to_cpu(*bias)) : std::nullopt;
  auto result = at::convolution(aliases.to_cpu(input), aliases.to_cpu(weight), bias_alias, stride, padding, dilation,
                                transposed, output_padding, groups);
  count_launch("aten::convolution", 3, bytes_of(input) + bytes_of(weight) + bytes_of(result));
  return aliases.to_device(result, input.device(), is_new);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  Aliases aliases;
  bool is_new = false;
  const std::vector<int64_t> bias_size{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      aliases.to_cpu(grad), aliases.to_cpu(input), aliases.to_cpu(weight), at::OptionalIntArrayRef(bias_size), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  count_launch("aten::convolution_backward", 3, bytes_of(grad) + bytes_of(input) + bytes_of(weight));
  auto to_device = [&](const Tensor& result) { return aliases.to_device(result, input.device(), is_new); };
  return {to_device(of_input), to_device(of_weight), to_device(of_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("is_pinned", is_pinned);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  // These are composed of other ops unless a device has kernels for them, as CUDA has.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!starts_with(op.name, "aten::_foreach_")) continue;
    const auto name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

// ---- autocast ------------------------------------------------------------------------------------------------------

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // torch's macros expect the name m
  using namespace at;
  using namespace at::autocast;
#define TO_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TO_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SET_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(TO_LOWER)
  AT_FORALL_FP32(TO_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_FP32)
  AT_FORALL_PROMOTE(TO_WIDEST)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

REGISTER_ALLOCATOR(kSim, &device_allocator);
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned_allocator);
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.attr("device_count") = int(kDevices);
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { Guard().setDevice({kSim, DeviceIndex(index)}); });
  module.def("synchronize", [](int index) { Guard().synchronizeDevice(DeviceIndex(index)); });
  module.def("on_wait", [](const py::object& function) {
    Lock lock(mutex);
    on_wait = function.is_none() ? nullptr : py::object(function).release().ptr();
  });
  module.def("reset", [] {
    Lock lock(mutex);
    ops.clear();
    waits.clear();
  });
  module.def("take_hazards", [] {
    Lock lock(mutex);
    return std::exchange(hazards, {});
  });
  module.def("counts", [] {
    Lock lock(mutex);
    std::map<std::string, std::tuple<int64_t, int64_t, int64_t>> counted;
    for (const auto& [name, op] : ops) counted[name] = {op.launches, op.tensors, op.bytes};
    return std::make_tuple(counted, waits);
  });
}
