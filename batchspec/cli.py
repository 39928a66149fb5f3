"""The command line. Defaults live in the configuration, work in `pipeline/`; errors become exit codes here alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import batchspec
from batchspec.errors import BatchspecError
from batchspec.pipeline.options import profile_config, profile_options, run_config, run_options

STARTED_AT = time.monotonic()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(batchspec.__version__, prog_name="batchspec")
def cli() -> None:
    """Offline batch generation over Parquet: exact, priced per row, never slower than not speculating."""


@cli.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@run_options
@click.pass_context
def generate(context: click.Context, /, inputs: tuple[str, ...], **options: object) -> None:
    """Answer every row of INPUT (Parquet files, directories, globs, hf:// names, s3:// addresses).

    The same command goes on where a stopped or failed run left off.
    """
    from batchspec.pipeline import runner

    config = run_config(context, inputs)
    summary = runner.generate(config, STARTED_AT)
    # imports Arrow, which the runner does after the workers have been started
    from batchspec.pipeline.finish import publish_summary, refuse_too_many_errors

    publish_summary(summary, config.output.summary_file)
    refuse_too_many_errors(summary, config.run.max_error_rate)


class MeasureByDefault(click.Group):
    """`profile INPUT` measures; `profile show FILE` shows."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["measure", *args])


@cli.group(cls=MeasureByDefault)
def profile() -> None:
    """Measure where speculation pays: `profile INPUT -o FILE`; look at it: `profile show FILE`."""


@profile.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@run_options
@profile_options
@click.pass_context
def measure(context: click.Context, /, inputs: tuple[str, ...], **_: object) -> None:
    """Measure acceptance and step cost on a sample of INPUT; -o names the profile's file."""
    from batchspec.pipeline.measuring import make_profile, show_profile

    config = run_config(context, inputs)
    path = Path(config.output.output or "profile.json").expanduser().absolute()
    make_profile(config, path, profile_config(context), lambda line: click.echo(line, err=True))
    click.echo(show_profile(str(path)))


@profile.command()
@click.argument("file")
@click.option("--image", metavar="FILE", help="Draw the curves into this file (.png, .svg, .pdf).")
def show(file: str, image: str | None) -> None:
    """Show a profile: the verdict, the routes by class and live rows, the curves, the trials."""
    from batchspec.pipeline.measuring import show_profile

    click.echo(show_profile(file, image))


@cli.command()
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@run_options
@click.option(
    "--max-cost-usd", type=click.FloatRange(min=0), help="Exit with code 6 where the job is expected to cost more."
)
@click.option("--compare", metavar="FILE", multiple=True, help="A profile of another engine, to plan the job with too.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    inputs: tuple[str, ...],
    max_cost_usd: float | None,
    compare: tuple[str, ...],
    as_json: bool,
    **_: object,
) -> None:
    """Say what the job will take and cost by a --profile, and whether speculating pays, before anything is spent."""
    from batchspec.pipeline.planning import compare_engines, compared, plan_job, refuse_expensive

    config = run_config(context, inputs)
    found = plan_job(config)
    others = compare_engines(config, compare)
    if as_json:
        figures = found.as_json() | {"compared": [other.as_json() for other in others]}
        click.echo(json.dumps(figures, allow_nan=False))
    else:
        click.echo(found.as_text())
        if others:
            click.echo(compared([found, *others]))
    refuse_expensive(found, max_cost_usd)


@cli.command()
@click.argument("output")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def status(output: str, as_json: bool) -> None:
    """Show how far the job in OUTPUT is; never disturbs it."""
    from batchspec.pipeline.status import read_status

    found = read_status(output)
    click.echo(json.dumps(found.as_json()) if as_json else found.as_text())


@cli.command()
@click.argument("output")
@click.option("--sample-rows", type=click.IntRange(min=1), default=64, show_default=True, help="Rows to audit.")
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed takes other rows.")
@click.option("--model", help="Where the model lies now, if not where the output says.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda:0, ...")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
def verify(output: str, as_json: bool, **options: Any) -> None:
    """Audit a sample of OUTPUT against a plain forward of its model. Exit code 5 where a token is not the model's."""
    from batchspec.pipeline.verify import verify_output

    audit = verify_output(output, **options)
    click.echo(json.dumps(audit.as_json(), allow_nan=False) if as_json else audit.as_text())
    audit.refuse_faults()


@cli.command()
@click.argument("outputs", metavar="OUTPUT...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON.")
@click.option("--html", metavar="FILE", help="Write one self-contained page with plots.")
def report(outputs: tuple[str, ...], as_json: bool, html: str | None) -> None:
    """Say what finished jobs cost and what speculation did; several OUTPUTs are compared with the first."""
    from batchspec.pipeline.report import report_numbers, write_html
    from batchspec.report.tables import format_report

    numbers = report_numbers(outputs)
    if html is not None:
        write_html(numbers, html)
    click.echo(json.dumps(numbers, allow_nan=False) if as_json else format_report(numbers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code of the process."""
    try:
        return int(cli.main(arguments, prog_name="batchspec", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 130
    except BatchspecError as error:
        click.echo(f"batchspec: {error}", err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
