#include <ATen/Parallel.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dataparallel/data_parallel.h>
#include <dataparallel/parallel_apply.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "support/catch.h"
#include "support/device_lists.h"
#include "support/meeting.h"
#include "support/values.h"

using dataparallel::current_replica;
using dataparallel::parallel_apply;
using dataparallel::WorkerTeam;
using test::Devices;
using test::message_of;
using torch::Tensor;

namespace {

using Body = std::function<void(int64_t)>;

std::vector<int64_t> replicas_of(const Devices& devices) {
  std::vector<int64_t> replicas(devices.size());
  std::iota(replicas.begin(), replicas.end(), 0);
  return replicas;
}

/// Calls `body(replica)` for all of `devices`, by `parallel_apply`.
void run(const Devices& devices, const Body& body) {
  std::vector<std::function<int(int64_t)>> modules(devices.size(),
                                                   [&](int64_t replica) {
                                                     body(replica);
                                                     return 0;
                                                   });
  parallel_apply(modules, replicas_of(devices), devices);
}

/// Sets the number of intra-op threads for its scope.
class IntraopThreads {
 public:
  explicit IntraopThreads(int threads) : before_(at::get_num_threads()) {
    at::set_num_threads(threads);
  }
  ~IntraopThreads() { at::set_num_threads(before_); }

 private:
  int before_;
};

bool replicas_meet(const Devices& devices) {
  test::Meeting meeting(devices.size());
  std::atomic<size_t> met{0};
  run(devices, [&](int64_t) { met += meeting.arrive(); });
  return met == devices.size();
}

/// Collects the warnings of the calling thread.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;
};

class OwnError : public std::exception {
 public:
  explicit OwnError(int code) : code(code) {}
  const char* what() const noexcept override { return "own error"; }
  int code;
};

/// The warnings of a run whose replica 1 throws `error`; `E` is caught.
template <class E>
std::vector<std::string> warnings_of(const E& error, E* caught,
                                     bool warn_always = true) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const c10::WarningUtils::WarnAlways always(warn_always);
  bool was_caught = false;
  try {
    run(test::cpu(2), [&](int64_t replica) {
      if (replica == 1) {
        throw error;
      }
    });
  } catch (const E& e) {
    *caught = e;
    was_caught = true;
  }
  CHECK(was_caught);
  return warnings.texts;
}

}  // namespace

// What is called with what.

TEST_CASE("each module is called with its own input, outputs in order",
          "[parallel_apply]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    std::vector<std::function<Tensor(Tensor)>> modules;
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < devices.size(); ++i) {
      const auto factor = static_cast<double>(i + 2);
      modules.emplace_back([factor](const Tensor& x) { return x * factor; });
      inputs.push_back(torch::full({3}, 10.0 + factor).to(devices[i]));
    }
    const std::vector<Tensor> outputs =
        parallel_apply(modules, inputs, devices);
    REQUIRE(outputs.size() == devices.size());
    for (size_t i = 0; i < devices.size(); ++i) {
      const auto factor = static_cast<double>(i + 2);
      CHECK(outputs[i].device() == devices[i]);
      CHECK(test::same(outputs[i], torch::full({3}, (10.0 + factor) * factor)));
    }
  }
}

TEST_CASE("torch modules give what they give alone", "[parallel_apply]") {
  for (const Devices& devices : test::short_device_lists()) {
    CAPTURE(test::name(devices));
    std::vector<torch::nn::Linear> modules;
    std::vector<std::tuple<Tensor>> inputs;
    std::vector<Tensor> expected;
    for (const torch::Device& device : devices) {
      torch::nn::Linear module(4, 2);
      const Tensor input = torch::rand({3, 4});
      expected.push_back(module(input).detach());
      module->to(device);
      modules.push_back(module);
      inputs.emplace_back(input.to(device));
    }
    const auto outputs = parallel_apply(modules, inputs, devices);
    for (size_t i = 0; i < devices.size(); ++i) {
      CHECK(outputs[i].cpu().allclose(expected[i]));
      CHECK(outputs[i].requires_grad());
    }
  }
}

TEST_CASE("a tuple is the arguments, anything else is the one argument",
          "[parallel_apply]") {
  const Devices devices = test::cpu(2);
  std::vector<std::function<int(int, int)>> sums(2, std::plus<>());
  CHECK(parallel_apply(sums, std::vector<std::tuple<int, int>>{{1, 2}, {3, 4}},
                       devices) == std::vector<int>{3, 7});

  const auto first = [](const std::pair<int, int>& pair) { return pair.first; };
  std::vector modules(2, first);
  CHECK(parallel_apply(modules,
                       std::vector<std::pair<int, int>>{{1, 2}, {3, 4}},
                       devices) == std::vector<int>{1, 3});
  const auto size = [](const std::array<int, 2>& array) {
    return array.size();
  };
  std::vector sizes(2, size);
  CHECK(parallel_apply(sizes, std::vector<std::array<int, 2>>(2), devices) ==
        std::vector<size_t>{2, 2});
}

TEST_CASE("lists of other lengths are refused", "[parallel_apply]") {
  std::vector<std::function<int(int)>> modules(2, [](int x) { return x; });
  CHECK(message_of<c10::ValueError>([&] {
          parallel_apply(modules, std::vector<int>{1}, test::cpu(2));
        }) ==
        "parallel_apply: there are 2 modules, 1 inputs and 2 devices, "
        "expected as many of each");
  CHECK(message_of<c10::ValueError>([&] {
          parallel_apply(modules, std::vector<int>{1, 2}, test::cpu(3));
        }) ==
        "parallel_apply: there are 2 modules, 2 inputs and 3 devices, "
        "expected as many of each");
  modules.clear();
  CHECK(message_of<c10::ValueError>([&] {
          parallel_apply(modules, std::vector<int>{}, {});
        }) == "parallel_apply: devices is empty, expected one device at least");
}

TEST_CASE("a device that does not exist is refused before any call",
          "[parallel_apply]") {
  std::atomic<int> calls{0};
  CHECK(
      message_of<c10::ValueError>([&] {
        run({torch::kCPU, torch::Device("fpga:1")}, [&](int64_t) { ++calls; });
      }) ==
      "parallel_apply: devices[1] is fpga:1, but there are no fpga devices");
  CHECK(calls == 0);
}

TEST_CASE("a team runs the replicas that it is asked for", "[parallel_apply]") {
  WorkerTeam team(test::cpu(4));
  CHECK(team.devices() == test::cpu(4));
  const auto ran = [&](const std::vector<int64_t>& replicas) {
    std::mutex mutex;
    std::multiset<int64_t> seen;
    team.run(replicas, [&](int64_t replica) {
      const std::lock_guard lock(mutex);
      seen.insert(replica);
    });
    return seen;
  };
  CHECK(ran({0, 1, 2, 3}) == std::multiset<int64_t>{0, 1, 2, 3});
  CHECK(ran({1, 3}) == std::multiset<int64_t>{1, 3});
  CHECK(ran({2}) == std::multiset<int64_t>{2});
  CHECK(ran({}).empty());
}

TEST_CASE("replicas that a team does not have are refused",
          "[parallel_apply]") {
  WorkerTeam team(test::cpu(2));
  const Body nothing = [](int64_t) {};
  CHECK(message_of<c10::ValueError>([&] {
          team.run({0, 2}, nothing);
        }) ==
        "parallel_apply: replicas[1] is 2, expected one of 2 replicas, each "
        "once and in order");
  CHECK(message_of<c10::ValueError>([&] { team.run({-1}, nothing); }) ==
        "parallel_apply: replicas[0] is -1, expected one of 2 replicas, each "
        "once and in order");
  CHECK(message_of<c10::ValueError>([&] {
          team.run({1, 1}, nothing);
        }) ==
        "parallel_apply: replicas[1] is 1, expected one of 2 replicas, each "
        "once and in order");
}

// All at once.

TEST_CASE("replicas run at the same time", "[parallel_apply]") {
  for (const Devices& devices : test::device_lists()) {
    CAPTURE(test::name(devices));
    CHECK(replicas_meet(devices));
  }
}

TEST_CASE("replicas run at the same time with one intra-op thread",
          "[parallel_apply]") {
  const IntraopThreads one(1);
  CHECK(replicas_meet(test::cpu(4)));
}

TEST_CASE("replicas run at the same time inside at::parallel_for",
          "[parallel_apply]") {
  const IntraopThreads threads(4);
  std::atomic<int> met{0};
  at::parallel_for(0, 4, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      met += replicas_meet(test::cpu(2));
    }
  });
  CHECK(met == 4);
}

TEST_CASE("replicas run at the same time inside a worker", "[parallel_apply]") {
  std::atomic<int> met{0};
  run(test::cpu(2), [&](int64_t replica) {
    met += replicas_meet(test::cpu(2));
    // The inner run is over: this thread is the outer replica again.
    met += current_replica() == replica;
  });
  CHECK(met == 4);
}

TEST_CASE("threads are kept from call to call", "[parallel_apply]") {
  const Devices devices = test::cpu(3);
  const auto threads = [&] {
    std::vector<std::thread::id> ids(devices.size());
    run(devices,
        [&](int64_t replica) { ids[replica] = std::this_thread::get_id(); });
    return ids;
  };
  const auto first = threads();
  CHECK(std::set<std::thread::id>(first.begin(), first.end()).size() == 3);
  CHECK(threads() == first);
}

TEST_CASE("one replica alone runs in the calling thread", "[parallel_apply]") {
  std::thread::id id;
  run(test::cpu(1), [&](int64_t) { id = std::this_thread::get_id(); });
  CHECK(id == std::this_thread::get_id());
}

TEST_CASE("many callers at once get their own results", "[parallel_apply]") {
  std::atomic<int> right{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&right, caller] {
      for (int i = 0; i < 25; ++i) {
        const Devices devices = test::cpu(2 + (caller + i) % 2);
        std::vector<std::function<Tensor(int64_t)>> modules(
            devices.size(), [&](int64_t replica) {
              return torch::full({4}, 100 * caller + 10 * i + replica);
            });
        const auto outputs =
            parallel_apply(modules, replicas_of(devices), devices);
        bool all = true;
        for (size_t r = 0; r < devices.size(); ++r) {
          all = all && outputs[r]
                           .eq(100 * caller + 10 * i + static_cast<int64_t>(r))
                           .all()
                           .item<bool>();
        }
        right += all;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(right == 200);
}

TEST_CASE("callers of one team wait for each other", "[parallel_apply]") {
  WorkerTeam team(test::cpu(2));
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::atomic<int> calls{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        team.run({0, 1}, [&](int64_t) {
          most = std::max<int>(most, ++inside);
          ++calls;
          --inside;
        });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(calls == 160);
  CHECK(most <= 2);
}

TEST_CASE("a team called from its own body is an error", "[parallel_apply]") {
  WorkerTeam team(test::cpu(2));
  const std::string message = message_of<c10::Error>([&] {
    team.run({0, 1}, [&](int64_t replica) {
      if (replica == 1) {
        team.run({0, 1}, [](int64_t) {});
      }
    });
  });
  CHECK(test::contains(message,
                       "parallel_apply: called from inside replica 1 of the "
                       "same workers, which cannot wait for themselves"));
  CHECK(test::contains(message, "replica 1 on cpu"));
}

TEST_CASE("teams that call each other in a circle are an error",
          "[parallel_apply]") {
  WorkerTeam first(test::cpu(2));
  WorkerTeam second(test::cpu(2));
  const std::vector<int64_t> inner =
      GENERATE(std::vector<int64_t>{0, 1}, std::vector<int64_t>{0});
  CHECK_THROWS_WITH(
      first.run({0, 1},
                [&](int64_t) {
                  second.run(inner, [&](int64_t) {
                    first.run({0, 1}, [](int64_t) {});
                  });
                }),
      Catch::Contains("called from inside replica 0 of the same workers"));
  first.run({0, 1}, [&](int64_t) { second.run({0, 1}, [](int64_t) {}); });
}

TEST_CASE("a replica knows its number, other threads have none",
          "[parallel_apply]") {
  for (const Devices& devices : test::device_lists()) {
    std::vector<std::optional<int64_t>> numbers(devices.size());
    run(devices,
        [&](int64_t replica) { numbers[replica] = current_replica(); });
    for (size_t i = 0; i < devices.size(); ++i) {
      CHECK(numbers[i] == static_cast<int64_t>(i));
    }
    CHECK_FALSE(current_replica().has_value());
  }
}

// The thread state.

namespace {

/// What a thread carries.
struct State {
  bool grad = at::GradMode::is_enabled();
  bool inference = c10::InferenceMode::is_enabled();
  bool anomaly = torch::autograd::AnomalyMode::is_enabled();
  bool saved_tensor_hooks = at::SavedTensorDefaultHooks::is_enabled();
  bool cache = at::autocast::is_autocast_cache_enabled();
  std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>> autocast =
      all_autocast();
  torch::ScalarType dtype = torch::empty({}).scalar_type();

  static std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>>
  all_autocast() {
    std::vector<std::tuple<at::DeviceType, bool, at::ScalarType>> all;
    for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      all.emplace_back(type, at::autocast::is_autocast_enabled(type),
                       at::autocast::get_autocast_dtype(type));
    }
    return all;
  }
  bool operator==(const State&) const = default;
};

/// The replicas' states equal the caller's; and so they do without `set`.
template <class Guard>
void check_state_is_carried(Guard&& set, const Devices& devices) {
  const State outside;
  const auto check = [&](const State& expected) {
    std::vector<std::optional<State>> states(devices.size());
    run(devices, [&](int64_t replica) { states[replica].emplace(); });
    for (const auto& state : states) {
      CHECK((state == expected));
    }
    CHECK((State() == expected));
  };
  check(outside);
  {
    const auto guard = set();
    const State inside;
    CHECK_FALSE((inside == outside));
    check(inside);
  }
  CHECK((State() == outside));
  check(outside);
}

template <class Set, class Reset>
class Scope {
 public:
  Scope(const Set& set, Reset reset) : reset_(std::move(reset)) { set(); }
  ~Scope() { reset_(); }
  Scope(const Scope&) = delete;

 private:
  Reset reset_;
};

}  // namespace

TEST_CASE("grad mode is the caller's", "[parallel_apply]") {
  for (const Devices& devices : test::device_lists()) {
    check_state_is_carried([] { return torch::NoGradGuard(); }, devices);
  }
}

TEST_CASE("without gradients outputs of all replicas have none",
          "[parallel_apply]") {
  std::vector<torch::nn::Linear> modules{torch::nn::Linear(2, 2),
                                         torch::nn::Linear(2, 2)};
  const std::vector<Tensor> inputs(2, torch::ones({1, 2}));
  {
    const torch::NoGradGuard no_grad;
    for (const Tensor& out : parallel_apply(modules, inputs, test::cpu(2))) {
      CHECK_FALSE(out.requires_grad());
    }
  }
  for (const Tensor& out : parallel_apply(modules, inputs, test::cpu(2))) {
    CHECK(out.requires_grad());
  }
}

TEST_CASE("inference mode is the caller's", "[parallel_apply]") {
  for (const Devices& devices : test::device_lists()) {
    check_state_is_carried([] { return c10::InferenceMode(); }, devices);
  }
  const c10::InferenceMode inference;
  std::vector<std::function<Tensor(int64_t)>> modules(
      2, [](int64_t) { return torch::ones({2}); });
  for (const Tensor& out :
       parallel_apply(modules, std::vector<int64_t>{0, 1}, test::cpu(2))) {
    CHECK(out.is_inference());
  }
}

// R09
TEST_CASE(
    "autocast is the caller's for every device type: flag, dtype and "
    "cache",
    "[parallel_apply]") {
  for (const auto type : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    for (const auto dtype : {torch::kFloat16, torch::kBFloat16}) {
      for (const bool cache : {true, false}) {
        const bool enabled_before = at::autocast::is_autocast_enabled(type);
        const auto dtype_before = at::autocast::get_autocast_dtype(type);
        CAPTURE(type, dtype, cache);
        check_state_is_carried(
            [&] {
              return Scope(
                  [&] {
                    at::autocast::set_autocast_enabled(type, true);
                    at::autocast::set_autocast_dtype(type, dtype);
                    at::autocast::set_autocast_cache_enabled(cache);
                  },
                  [=] {
                    at::autocast::set_autocast_enabled(type, enabled_before);
                    at::autocast::set_autocast_dtype(type, dtype_before);
                    at::autocast::set_autocast_cache_enabled(true);
                  });
            },
            test::cpu(3));
      }
    }
  }
}

TEST_CASE("all replicas compute in the caller's autocast dtype",
          "[parallel_apply]") {
  std::vector<torch::nn::Linear> modules{torch::nn::Linear(2, 2),
                                         torch::nn::Linear(2, 2)};
  const std::vector<Tensor> inputs(2, torch::ones({1, 2}));
  const auto dtype_before = at::autocast::get_autocast_dtype(torch::kCPU);
  for (const auto dtype : {torch::kBFloat16, torch::kFloat16}) {
    at::autocast::set_autocast_enabled(torch::kCPU, true);
    at::autocast::set_autocast_dtype(torch::kCPU, dtype);
    const auto outputs = parallel_apply(modules, inputs, test::cpu(2));
    at::autocast::set_autocast_enabled(torch::kCPU, false);
    at::autocast::clear_cache();
    CHECK(outputs[0].scalar_type() == dtype);
    CHECK(outputs[1].scalar_type() == dtype);
  }
  at::autocast::set_autocast_dtype(torch::kCPU, dtype_before);
  CHECK(parallel_apply(modules, inputs, test::cpu(2))[1].scalar_type() ==
        torch::kFloat32);
}

TEST_CASE("anomaly mode is the caller's", "[parallel_apply]") {
  check_state_is_carried(
      [] {
        return Scope([] { torch::autograd::AnomalyMode::set_enabled(true); },
                     [] { torch::autograd::AnomalyMode::set_enabled(false); });
      },
      test::cpu(3));
}

TEST_CASE("the default dtype is the caller's", "[parallel_apply]") {
  check_state_is_carried(
      [] {
        return Scope(
            [] { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); },
            [] { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); });
      },
      test::cpu(3));
}

TEST_CASE("a ban of saved-tensor hooks is the caller's", "[parallel_apply]") {
  check_state_is_carried(
      [] {
        return Scope([] { at::SavedTensorDefaultHooks::disable("test"); },
                     [] { at::SavedTensorDefaultHooks::enable(); });
      },
      test::cpu(3));
}

namespace {
std::atomic<int> recorded{0};
}

TEST_CASE("the caller's profiler callbacks see the replicas' operators",
          "[parallel_apply]") {
  const Devices devices = test::cpu(3);
  const Body work = [](int64_t) { torch::ones({2}).add(1); };
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function)
                                     -> std::unique_ptr<at::ObserverContext> {
        recorded += std::string(function.name()) == "aten::add";
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  recorded = 0;
  work(0);
  const int alone = recorded;
  CHECK(alone > 0);
  run(devices, work);
  CHECK(recorded == 4 * alone);
  at::removeCallback(handle);
  run(devices, work);
  CHECK(recorded == 4 * alone);
}

TEST_CASE("the current device is the replica's, the streams the caller's",
          "[parallel_apply][sim]") {
  const Devices devices = test::sim(3);
  const auto* guard = c10::impl::getDeviceGuardImpl(devices[0].type());
  std::vector<c10::Stream> before;
  std::vector<c10::Stream> streams;
  for (const torch::Device& device : devices) {
    streams.push_back(guard->getStreamFromGlobalPool(device));
    before.push_back(guard->exchangeStream(streams.back()));
  }
  const auto seen_by = [&] {
    std::vector<c10::Stream> seen;
    for (const torch::Device& device : devices) {
      seen.push_back(guard->getStream(device));
    }
    return seen;
  };
  const auto check = [&](const std::vector<c10::Stream>& expected) {
    std::vector<std::vector<c10::Stream>> seen(devices.size());
    Devices current(devices.size(), torch::kCPU);
    run(devices, [&](int64_t replica) {
      current[replica] = guard->getDevice();
      seen[replica] = seen_by();
    });
    CHECK(current == devices);
    for (const auto& one : seen) {
      CHECK((one == expected));
    }
    CHECK(guard->getDevice() == devices[0]);
    CHECK((seen_by() == expected));
  };
  check(streams);
  for (const c10::Stream& stream : before) {
    guard->exchangeStream(stream);
  }
  check(before);
}

TEST_CASE("one replica alone has its device current, and only inside",
          "[parallel_apply][sim]") {
  const Devices devices = test::sim(2);
  const auto* guard = c10::impl::getDeviceGuardImpl(devices[0].type());
  std::optional<torch::Device> current;
  run({devices[1]}, [&](int64_t) { current = guard->getDevice(); });
  CHECK(current == devices[1]);
  CHECK(guard->getDevice() == devices[0]);
}

namespace {

std::mutex left_mutex;
std::vector<State> left;

/// Notes, when its thread ends, what state the thread was left in.
struct AtThreadEnd {
  ~AtThreadEnd() {
    const std::lock_guard lock(left_mutex);
    left.emplace_back();
  }
};

}  // namespace

TEST_CASE("workers are put back as they were, also by a body that throws",
          "[parallel_apply]") {
  for (const bool throwing : {false, true}) {
    CAPTURE(throwing);
    left.clear();
    const State outside;
    {
      WorkerTeam team(test::cpu(2));
      const torch::NoGradGuard no_grad;
      at::autocast::set_autocast_enabled(torch::kCPU, true);
      at::autocast::set_autocast_cache_enabled(false);
      try {
        team.run({0, 1}, [&](int64_t) {
          thread_local AtThreadEnd at_thread_end;
          static_cast<void>(&at_thread_end);
          // The body's own changes do not last either.
          at::autocast::set_autocast_enabled(torch::kCUDA, true);
          at::autocast::set_autocast_dtype(torch::kCPU, torch::kFloat16);
          if (throwing) {
            throw 3;
          }
        });
      } catch (int) {
      }
      at::autocast::set_autocast_enabled(torch::kCPU, false);
      at::autocast::set_autocast_cache_enabled(true);
      // A next run with the same workers sees the caller's state alone.
      std::vector<std::optional<State>> states(2);
      team.run({0, 1}, [&](int64_t replica) { states[replica].emplace(); });
      CHECK((states[0] == State()));
      CHECK((states[1] == State()));
    }
    REQUIRE(left.size() == 2);
    CHECK((left[0] == outside));
    CHECK((left[1] == outside));
  }
}

// Intra-op threads.

TEST_CASE("CPU replicas share the caller's intra-op threads evenly",
          "[parallel_apply]") {
  for (const int threads : {1, 2, 4, 7}) {
    for (const size_t replicas : {2, 3, 4}) {
      CAPTURE(threads, replicas);
      const IntraopThreads guard(threads);
      std::vector<int> seen(replicas);
      run(test::cpu(replicas),
          [&](int64_t replica) { seen[replica] = at::get_num_threads(); });
      const int share = std::max(1, threads / static_cast<int>(replicas));
      CHECK(seen == std::vector<int>(replicas, share));
      // The caller keeps its number, and so do threads that are new.
      CHECK(at::get_num_threads() == threads);
      int in_new_thread = 0;
      std::thread([&] { in_new_thread = at::get_num_threads(); }).join();
      CHECK(in_new_thread == threads);
    }
  }
}

TEST_CASE("threads that start teams at the same time share their own number",
          "[parallel_apply]") {
  const IntraopThreads guard(8);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 32; ++i) {
    callers.emplace_back([&] {
      dataparallel::WorkerTeam team(test::cpu(2));
      for (int repeat = 0; repeat < 3; ++repeat) {
        team.run({0, 1}, [&](int64_t) { wrong += at::get_num_threads() != 4; });
        wrong += at::get_num_threads() != 8;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  CHECK(wrong == 0);
  int in_new_thread = 0;
  std::thread([&] { in_new_thread = at::get_num_threads(); }).join();
  CHECK(in_new_thread == 8);
}

TEST_CASE("workers inside a worker divide its intra-op threads",
          "[parallel_apply]") {
  const IntraopThreads guard(8);
  std::vector<int> seen(4);
  run(test::cpu(2), [&](int64_t outer) {
    run(test::cpu(2), [&](int64_t inner) {
      seen[2 * outer + inner] = at::get_num_threads();
    });
  });
  CHECK(seen == std::vector<int>(4, 2));
  int in_new_thread = 0;
  std::thread([&] { in_new_thread = at::get_num_threads(); }).join();
  CHECK(in_new_thread == 8);
}

TEST_CASE("one replica alone has all of the caller's intra-op threads",
          "[parallel_apply]") {
  const IntraopThreads guard(5);
  int seen = 0;
  run(test::cpu(1), [&](int64_t) { seen = at::get_num_threads(); });
  CHECK(seen == 5);
}

TEST_CASE("replicas on accelerators leave the intra-op threads to the CPU's",
          "[parallel_apply][sim]") {
  const IntraopThreads guard(4);
  const Devices devices{torch::kCPU, test::sim(1)[0], torch::kCPU};
  std::vector<int> seen(3);
  run(devices, [&](int64_t replica) { seen[replica] = at::get_num_threads(); });
  CHECK(seen[0] == 2);
  CHECK(seen[2] == 2);
  CHECK(at::get_num_threads() == 4);
}

TEST_CASE("the caller's intra-op threads are untouched by a throwing run",
          "[parallel_apply]") {
  const IntraopThreads guard(4);
  CHECK_THROWS(
      run(test::cpu(2), [](int64_t) { throw std::runtime_error("stop"); }));
  CHECK(at::get_num_threads() == 4);
}

// Other processes.

TEST_CASE("a forked process makes its own threads, or is told to",
          "[parallel_apply]") {
  const auto in_child = [](const std::function<bool()>& act) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // rather than wait for threads that are not there
      _exit(act() ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  };
  std::vector<std::function<int(int)>> twice(2, [](int x) { return 2 * x; });
  const std::vector<int> inputs{1, 2};
  const auto apply = [&] {
    return parallel_apply(twice, inputs, test::cpu(2)) == std::vector{2, 4};
  };
  auto team = std::make_unique<WorkerTeam>(test::cpu(2));
  team->run({0, 1}, [](int64_t) {});
  CHECK(apply());
#ifndef __SANITIZE_THREAD__  // which knows no threads of a forked process
  CHECK(in_child(apply));
#endif
  CHECK(in_child([&] {
    const std::string text = message_of<c10::Error>([&] {
      team->run({0, 1}, [](int64_t) {});
    });
    team.reset();  // does not wait
    return text.find("forked from") != std::string::npos;
  }));
  CHECK(apply());
}

TEST_CASE("an empty module is an error before anything runs",
          "[parallel_apply][errors]") {
  std::vector<torch::nn::Linear> modules{torch::nn::Linear(2, 2), nullptr};
  const std::vector<Tensor> inputs(2, torch::ones({1, 2}));
  CHECK(message_of<c10::TypeError>([&] {
          parallel_apply(modules, inputs, test::cpu(2));
        }).find("modules[1] is empty") != std::string::npos);
}

// The end of the program.

namespace {

struct ExitsImpl : torch::nn::Cloneable<ExitsImpl> {
  ExitsImpl() { reset(); }
  void reset() override {
    weight = register_parameter("weight", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (dataparallel::current_replica() == 0) {
      std::exit(3);
    }
    // Still at work while the wrapper goes.
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return x * weight;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Exits);

}  // namespace

// Run by the next case in a process of its own.
TEST_CASE("a replica of a global wrapper exits", "[.]") {
  static dataparallel::DataParallel<Exits> model(
      Exits(), dataparallel::DataParallelOptions().devices(test::cpu(2)));
  model(torch::ones({2}));
}

TEST_CASE("a program that a replica of a global wrapper exits ends so",
          "[parallel_apply]") {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  const int status = std::system(
      (self + " 'a replica of a global wrapper exits' > /dev/null").c_str());
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
}

// Errors.

namespace {

/// The message of a run whose replicas `1` and up throw what `fail` throws.
template <class E>
std::string thrown_by(const std::function<void()>& fail,
                      const Devices& devices) {
  return message_of<E>([&] {
    run(devices, [&](int64_t replica) {
      if (replica > 0) {
        fail();
      }
    });
  });
}

}  // namespace

TEST_CASE("an exception keeps its type and gains the replica and its device",
          "[parallel_apply]") {
  for (const Devices& devices :
       {test::cpu(2), test::cpu(4), test::sim(2), test::sim(4)}) {
    const std::string where = "replica 1 on " + devices[1].str();
    CAPTURE(where);
    const auto check = [&](const std::string& message,
                           const std::string& text) {
      CHECK(test::contains(message, text));
      CHECK(test::contains(message, where));
      CHECK(message.find("replica 2") == std::string::npos);
    };
    check(thrown_by<c10::ValueError>(
              [] { TORCH_CHECK_VALUE(false, "bad value"); }, devices),
          "bad value");
    check(thrown_by<c10::IndexError>(
              [] { TORCH_CHECK_INDEX(false, "bad index"); }, devices),
          "bad index");
    check(thrown_by<c10::Error>([] { torch::ones({2}).add(torch::ones({3})); },
                                devices),
          "must match the size");
#define CHECK_STANDARD(type)                                              \
  CHECK(thrown_by<type>([] { throw type("text of " #type); }, devices) == \
        "text of " #type " (" + where + ")")
    CHECK_STANDARD(std::runtime_error);
    CHECK_STANDARD(std::range_error);
    CHECK_STANDARD(std::overflow_error);
    CHECK_STANDARD(std::underflow_error);
    CHECK_STANDARD(std::logic_error);
    CHECK_STANDARD(std::invalid_argument);
    CHECK_STANDARD(std::domain_error);
    CHECK_STANDARD(std::length_error);
    CHECK_STANDARD(std::out_of_range);
#undef CHECK_STANDARD
  }
}

TEST_CASE("one replica alone names itself too", "[parallel_apply]") {
  CHECK(message_of<std::out_of_range>([] {
          run(test::cpu(1), [](int64_t) { throw std::out_of_range("far"); });
        }) == "far (replica 0 on cpu)");
  WorkerTeam team(test::cpu(4));
  CHECK(message_of<std::out_of_range>([&] {
          team.run({2}, [](int64_t) { throw std::out_of_range("far"); });
        }) == "far (replica 2 on cpu)");
  CHECK_FALSE(current_replica().has_value());
}

TEST_CASE(
    "an exception of the user's own type arrives as it is, with a "
    "warning",
    "[parallel_apply]") {
  OwnError caught(0);
  const auto warnings = warnings_of(OwnError(7), &caught);
  CHECK(caught.code == 7);
  REQUIRE(warnings.size() == 1);
  CHECK(test::contains(warnings[0],
                       "replica 1 on cpu throws an exception whose message "
                       "cannot be added to: own error"));
}

TEST_CASE("a type derived from the standard library's stays that type",
          "[parallel_apply]") {
  struct Derived : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  Derived caught("");
  const auto warnings = warnings_of(Derived("text"), &caught);
  CHECK(std::string(caught.what()) == "text");
  CHECK(warnings.size() == 1);
}

TEST_CASE("what is thrown and no exception arrives as it is, with a warning",
          "[parallel_apply]") {
  int caught = 0;
  const auto warnings = warnings_of(42, &caught);
  CHECK(caught == 42);
  REQUIRE(warnings.size() == 1);
  CHECK(test::contains(
      warnings[0], "replica 1 on cpu throws an exception without a message"));
}

TEST_CASE("each of these warnings comes every time", "[parallel_apply]") {
  OwnError own(0);
  int number = 0;
  warnings_of(OwnError(7), &own, /*warn_always=*/false);
  warnings_of(42, &number, /*warn_always=*/false);
  CHECK(warnings_of(OwnError(8), &own, /*warn_always=*/false).size() == 1);
  CHECK(warnings_of(43, &number, /*warn_always=*/false).size() == 1);
  CHECK(own.code == 8);
  CHECK(number == 43);
}

TEST_CASE("the lowest replica's exception is the one, whoever throws first",
          "[parallel_apply]") {
  test::Meeting thrown(1);
  CHECK(message_of<std::runtime_error>([&] {
          run(test::cpu(4), [&](int64_t replica) {
            if (replica == 1) {
              thrown.arrive();
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
            if (replica > 0) {
              throw std::runtime_error("from " + std::to_string(replica));
            }
          });
        }) == "from 1 (replica 1 on cpu)");
}

TEST_CASE("all workers finish before an exception leaves", "[parallel_apply]") {
  for (int i = 0; i < 10; ++i) {
    std::atomic<int> finished{0};
    CHECK_THROWS_AS(
        run(test::cpu(3),
            [&](int64_t replica) {
              if (replica == 0) {
                throw std::runtime_error("at once");
              }
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
              ++finished;
            }),
        std::runtime_error);
    CHECK(finished == 2);
  }
}

TEST_CASE("300 calls, some of which throw, leave each other alone",
          "[parallel_apply]") {
  WorkerTeam team(test::cpu(3));
  for (int i = 0; i < 300; ++i) {
    CAPTURE(i);
    // Bit r of the number: replica r throws.
    const int throwing = (i * 5) % 8;
    std::atomic<int> calls{0};
    std::string message;
    try {
      team.run({0, 1, 2}, [&](int64_t replica) {
        ++calls;
        if ((throwing >> replica & 1) != 0) {
          if (i % 2 == 0) {
            throw std::out_of_range(std::to_string(i));
          }
          TORCH_CHECK_VALUE(false, i);
        }
      });
    } catch (const std::out_of_range& error) {
      CHECK(i % 2 == 0);
      message = error.what();
    } catch (const c10::ValueError& error) {
      CHECK(i % 2 == 1);
      message = error.what_without_backtrace();
    }
    CHECK(calls == 3);
    if (throwing == 0) {
      CHECK(message.empty());
    } else {
      const int lowest = std::countr_zero(static_cast<unsigned>(throwing));
      CHECK(test::contains(message, std::to_string(i)));
      CHECK(test::contains(message,
                           "replica " + std::to_string(lowest) + " on cpu"));
    }
  }
}

TEST_CASE("an exception is freed with its last handler", "[parallel_apply]") {
  const auto alive = std::make_shared<int>(0);
  struct Holding {
    std::shared_ptr<int> held;
  };
  WorkerTeam team(test::cpu(3));
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  try {
    team.run({0, 1, 2}, [&](int64_t) { throw Holding{alive}; });
    FAIL_CHECK("nothing was thrown");
  } catch (const Holding&) {
  }
  CHECK(alive.use_count() == 1);
}
