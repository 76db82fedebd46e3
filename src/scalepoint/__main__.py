"""python -m scalepoint"""

from scalepoint.cli import main

main()
