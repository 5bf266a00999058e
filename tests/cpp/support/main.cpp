// The program of every test: Catch2's runner, whose exit status ctest reads.
#define CATCH_CONFIG_RUNNER
#define CATCH_CONFIG_EXTERNAL_INTERFACES
#include "support/catch.h"

#include <dataparallel/simulated.h>

#include <iostream>

namespace {

bool raced = false;

/// A test that leaves a race on simulated devices has failed.
class RaceListener : public test::ListenerBase {
 public:
  using test::ListenerBase::ListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo&) override {
    dataparallel::simulated::clear_races();
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    for (const auto& race : dataparallel::simulated::races()) {
      raced = true;
      std::cerr << "FAILED: " << test::name_of(stats) << ": " << race.message()
                << '\n';
    }
  }
};

}  // namespace

CATCH_REGISTER_LISTENER(RaceListener)

int main(int argc, char* argv[]) {
  const int failed = Catch::Session().run(argc, argv);
  return failed == 0 && raced ? 1 : failed;
}
