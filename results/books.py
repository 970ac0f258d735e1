"""Makes data/books, the corpus of most records: 282 books of a public repository, no author in two splits.

git clone https://github.com/mlschmitt/classic-books-markdown
git -C classic-books-markdown checkout 944882722e9a96fa6cf2739dc2ea757e101f412f
python results/books.py classic-books-markdown --out data/books
"""

import argparse
import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LIST = Path(__file__).with_suffix(".tsv")


def main() -> None:
    """Write a parquet file a split, with the books in the order of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="where it was cloned")
    parser.add_argument("--out", type=Path, default=Path("data/books"), help="default: data/books")
    given = parser.parse_args()
    with LIST.open(encoding="utf-8", newline="") as file:
        books = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    given.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        rows = [
            {"author": book["author"], "title": book["title"], "text": path.read_bytes().decode()}
            for book in books
            if book["split"] == split
            for path in [given.repository / book["author"] / f"{book['title']}.md"]
        ]
        pq.write_table(pa.Table.from_pylist(rows), given.out / f"{split}.parquet")
        print(f"{split}: {len(rows)} books, {sum(len(row['text']) for row in rows):,} characters")


if __name__ == "__main__":
    main()
