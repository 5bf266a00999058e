// The program `dataparallel`: looks into checkpoints, converts and compares
// them, without running anything that is in them.

#include <c10/util/Exception.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "command_line/commands.h"
#include "command_line/convert_dtype.h"
#include "command_line/interruption.h"
#include "command_line/output.h"

namespace dataparallel::command_line {
namespace {

CLI::App* add_inspect(CLI::App& app, InspectArguments& arguments) {
  CLI::App* command = app.add_subcommand(
      "inspect", "List the tensors of a checkpoint, without reading them");
  command->add_option("file", arguments.file, "The checkpoint")->required();
  command->add_flag("--json", arguments.json, "Print JSON");
  return command;
}

CLI::App* add_convert(CLI::App& app, ConvertArguments& arguments) {
  CLI::App* command = app.add_subcommand(
      "convert",
      "Read a checkpoint of any format and write it as torch.save does or, if "
      "OUT ends with .safetensors, as safetensors");
  command->add_option("in", arguments.input, "The checkpoint")->required();
  command->add_option("out", arguments.output, "The file to write")->required();
  command->add_option("--key", arguments.key,
                      "Take the state_dict at this place, as model.net");
  command->add_option("--strip-prefix", arguments.strip_prefix,
                      "Take it from the names that have it, as module.");
  command->add_option("--add-prefix", arguments.add_prefix,
                      "Put it before every name");
  command
      ->add_option("--dtype", arguments.dtype,
                   "Convert the floating-point tensors")
      ->check(CLI::IsMember(convertible_dtypes()));
  command->add_flag("--allow-overflow", arguments.allow_overflow,
                    "--dtype: write values beyond its largest as torch does");
  command->add_flag("--copy-shared", arguments.copy_shared,
                    "safetensors: write tensors that share memory as copies");
  command->add_flag("--json", arguments.json, "Print JSON");
  return command;
}

CLI::App* add_diff(CLI::App& app, DiffArguments& arguments) {
  CLI::App* command = app.add_subcommand(
      "diff",
      "Compare what two checkpoints hold: exit code 0 if it is the same, 1 if "
      "it differs. The same are keys with their types; values; of tensors "
      "dtype, shape, layout, quantization and requires_grad; of containers "
      "the class, an OrderedDict's order and _metadata. NaN is the same as "
      "NaN. "
      "Not compared: strides, devices, and which tensors share memory");
  command->add_option("a", arguments.a, "One checkpoint")->required();
  command->add_option("b", arguments.b, "The other")->required();
  command->add_flag("--values-only", arguments.values_only,
                    "Leave aside the classes of mappings and sequences, "
                    "_metadata, order and requires_grad");
  command->add_flag("--json", arguments.json, "Print JSON");
  return command;
}

/// torch warns its callers of what is a prototype or will go; here a file has
/// it, which nobody can change.
class NoWarnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

int run(int argc, char** argv) {
  CLI::App app(
      "Looks into checkpoints (of torch.save in all its formats, TorchScript, "
      "C++ archives, safetensors), converts and compares them. Nothing in them "
      "is ever executed.",
      "dataparallel");
  // None is looked for below: CLI11 would not name a wrong one.
  app.require_subcommand(0, 1);
  app.set_version_flag("--version", DATAPARALLEL_VERSION);
  app.footer(
      "Exit codes: 0 done (diff: the same); 1 diff: different; 2 wrong "
      "arguments; 3 another error.");
  InspectArguments inspect;
  ConvertArguments convert;
  DiffArguments diff;
  const CLI::App* inspect_command = add_inspect(app, inspect);
  const CLI::App* convert_command = add_convert(app, convert);
  add_diff(app, diff);
  const auto expected = [](const std::string& what) {
    return UsageError(what + "; expected inspect, convert or diff");
  };
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const CLI::ExtrasError& error) {
    if (app.get_subcommands().empty()) {
      throw expected("there is no subcommand " + app.remaining().front());
    }
    throw UsageError(error.what());
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  if (app.get_subcommands().empty()) {
    throw expected("a subcommand is required");
  }
  if (inspect_command->parsed()) {
    return inspect_file(inspect);
  }
  return convert_command->parsed() ? convert_file(convert) : diff_files(diff);
}

}  // namespace
}  // namespace dataparallel::command_line

int main(int argc, char** argv) {
  namespace command_line = dataparallel::command_line;
  try {
    command_line::NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
    const int code = command_line::run(argc, argv);
    command_line::flush_output();
    return code;
  } catch (const command_line::Interrupted& interrupted) {
    command_line::end_by(interrupted);
  } catch (const command_line::UsageError& error) {
    fmt::print(stderr, "dataparallel: {}\n", error.what());
    return command_line::kUsage;
  } catch (const c10::Error& error) {
    fmt::print(stderr, "dataparallel: {}\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    fmt::print(stderr, "dataparallel: {}\n", error.what());
  }
  return command_line::kFailure;
}
