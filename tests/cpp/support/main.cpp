// The program of every test: Catch2's runner, whose exit status ctest reads.
#define CATCH_CONFIG_RUNNER
#include "support/catch.h"

int main(int argc, char* argv[]) {
  return Catch::Session().run(argc, argv);
}
